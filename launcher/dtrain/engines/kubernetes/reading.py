"""Threads that read from the API server: the pods, the job, and the log of each pod.

Each thread tries again for as long as it is asked to: a server that is down, a token that has
expired and a watch that ends do not end a job.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from dtrain.diagnostics import AuthError, ConnectError, NodeError
from dtrain.engines.kubernetes import objects
from dtrain.engines.kubernetes.client import Client, GoneError, NotFoundError
from dtrain.engines.kubernetes.launched import Launched
from dtrain.engines.kubernetes.lines import Cursor, stamped
from dtrain.engines.kubernetes.objects import JobState, Pod
from dtrain.launchplan import names
from dtrain.messages.decode import ProtocolError, parse_object

FIRST_DELAY, LAST_DELAY = 0.5, 15.0
"""Seconds before the first and the later attempts to ask again."""
JOB_SECONDS = 1.0
"""Seconds between two questions for the state of the job."""
WATCH_SECONDS = 240
"""Seconds after which the server ends a watch, and the next one begins."""
MAX_WAITING = 1000
"""Pieces of output that wait for the thread that stores them."""


@dataclass(frozen=True, slots=True)
class PodsListed:
    """All pods of the job."""

    pods: tuple[Pod, ...]


@dataclass(frozen=True, slots=True)
class PodChanged:
    pod: Pod


@dataclass(frozen=True, slots=True)
class PodRemoved:
    """The last state of a pod that is gone."""

    pod: Pod


@dataclass(frozen=True, slots=True)
class JobSeen:
    """None: there is no such job."""

    state: JobState | None


@dataclass(frozen=True, slots=True)
class Lines:
    """New lines of a pod's log, and the position after them."""

    uid: str
    lines: tuple[bytes, ...]
    last: int
    count: int
    gap: bool = False
    """Whether lines before them are missing."""


@dataclass(frozen=True, slots=True)
class LogEnded:
    uid: str
    whole: bool
    """Whether the log was read until its container ended."""


@dataclass(frozen=True, slots=True)
class Warned:
    """Why a pod is missing."""

    text: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """A question without an answer; it is asked again."""

    text: str


@dataclass(frozen=True, slots=True)
class Recovered:
    pass


Event = (
    PodsListed | PodChanged | PodRemoved | JobSeen | Lines | LogEnded | Warned | Trouble | Recovered
)


class Readers:
    """The threads of one run. Their events arrive in `events`."""

    def __init__(self, client: Client, launched: Launched) -> None:
        self._client = client
        self._job_path = launched.path
        self._selector = launched.selector
        self._stopped = threading.Event()
        self.events: queue.Queue[Event] = queue.Queue(MAX_WAITING)
        self._troubled: set[str] = set()
        self._job_events = f"involvedObject.name={launched.name}-{names.REPLICATED_JOB}-0"
        self.pods_missing = False
        """Whether to ask why pods are missing."""

    def start(self) -> None:
        self._thread("pods", self._watch_pods)
        self._thread("job", self._ask_for_job)

    def stop(self) -> None:
        """The threads end on their own; a read that waits ends with its connection."""
        self._stopped.set()

    def _thread(self, name: str, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name=f"dtrain-kubernetes-{name}", daemon=True).start()

    def _send(self, event: Event) -> None:
        while not self._stopped.is_set():
            try:
                self.events.put(event, timeout=1)
            except queue.Full:
                continue
            return

    def _trouble(self, source: str, error: Exception) -> None:
        if not self._troubled:
            self._send(Trouble(error.message if isinstance(error, NodeError) else str(error)))
        self._troubled.add(source)

    def _recovered(self, source: str) -> None:
        if source in self._troubled:
            self._troubled.discard(source)
            if not self._troubled:
                self._send(Recovered())

    # The job and its pods --------------------------------------------------------------------

    def _ask_for_job(self) -> None:
        delay = FIRST_DELAY
        while not self._stopped.is_set():
            try:
                state = objects.job(self._client.request("GET", self._job_path))
            except NotFoundError:
                self._recovered("job")
                self._send(JobSeen(None))
            except (NodeError, ProtocolError) as error:
                self._trouble("job", error)
                self._stopped.wait(delay)
                delay = min(LAST_DELAY, 2 * delay)
                continue
            else:
                self._recovered("job")
                self._send(JobSeen(state))
                if self.pods_missing:
                    self._ask_for_warnings()
            delay = FIRST_DELAY
            self._stopped.wait(JOB_SECONDS)

    def _ask_for_warnings(self) -> None:
        path = "/api/v1/namespaces/{namespace}/events"
        with contextlib.suppress(NodeError, ProtocolError):  # not everybody may read events
            found = self._client.request("GET", path, fieldSelector=self._job_events)
            for text in objects.warnings(found):
                self._send(Warned(text))

    def _watch_pods(self) -> None:
        delay = FIRST_DELAY
        version = ""
        while not self._stopped.is_set():
            try:
                if not version:
                    version = self._list_pods()
                version = self._follow_pods(version)
                self._recovered("pods")
                delay = FIRST_DELAY
                # A server that ends each watch at once is not asked all the time.
                self._stopped.wait(FIRST_DELAY / 5)
            except GoneError:
                version = ""
                self._stopped.wait(FIRST_DELAY)
            except (NodeError, ProtocolError) as error:
                version = ""
                self._trouble("pods", error)
                self._stopped.wait(delay)
                delay = min(LAST_DELAY, 2 * delay)

    def _list_pods(self) -> str:
        path = "/api/v1/namespaces/{namespace}/pods"
        found = objects.object_list(self._client.request("GET", path, labelSelector=self._selector))
        pods = [objects.pod(one) for one in found.items]
        self._recovered("pods")
        self._send(PodsListed(tuple(pod for pod in pods if pod is not None)))
        return found.metadata.resourceVersion

    def _follow_pods(self, version: str) -> str:
        """Watch until the server ends the watch. Returns the version to go on from; empty to list
        all pods again. Raises GoneError, other NodeErrors and ProtocolError."""
        lines = self._client.stream(
            "/api/v1/namespaces/{namespace}/pods",
            watch="true",
            labelSelector=self._selector,
            resourceVersion=version,
            timeoutSeconds=WATCH_SECONDS,
            allowWatchBookmarks="true",
        )
        try:
            for several in lines:
                for line in several:
                    if self._stopped.is_set() or not line.endswith(b"\n"):
                        return version
                    event = objects.watch_event(parse_object(line))
                    if event.type == "ERROR":
                        return ""  # most often 410: the version is too old
                    version = event.version or version
                    if event.type != "BOOKMARK" and (pod := objects.pod(event.object)) is not None:
                        removed = event.type == "DELETED"
                        self._send(PodRemoved(pod) if removed else PodChanged(pod))
        finally:
            lines.close()
        return version

    # Logs ------------------------------------------------------------------------------------

    def read_log(self, pod: Pod, cursor: Cursor, over: threading.Event) -> None:
        """Read the log of ``pod`` from ``cursor`` on. ``over``: set once its container has ended;
        the log that is read from then on is the whole one."""
        self._thread(pod.name, lambda: self._read_log(pod, cursor, over))

    def _read_log(self, pod: Pod, cursor: Cursor, over: threading.Event) -> None:
        delay = FIRST_DELAY
        whole = False
        while not self._stopped.is_set():
            complete = over.is_set()
            try:
                self._stream_log(pod, cursor)
                whole = True
                self._recovered(pod.uid)
                if complete:
                    break
                over.wait(delay)
                delay = min(1.0, 2 * delay)
            except NotFoundError:
                break
            except (ConnectError, AuthError) as error:
                whole = False
                self._trouble(pod.uid, error)
                self._stopped.wait(delay)
                delay = min(LAST_DELAY, 2 * delay)
            except NodeError:
                # The container is being created, or its log is gone.
                if complete:
                    break
                over.wait(delay)
                delay = min(2.0, 2 * delay)
        self._send(LogEnded(pod.uid, whole))

    def _stream_log(self, pod: Pod, cursor: Cursor) -> None:
        since = {"sinceTime": cursor.since} if cursor.since else {}
        stream = self._client.stream(
            f"/api/v1/namespaces/{{namespace}}/pods/{pod.name}/log",
            container=names.REPLICATED_JOB,
            follow="true",
            timestamps="true",
            **since,
        )
        cursor.begin()
        try:
            for several in stream:
                new: list[bytes] = []
                gap = False
                for line in several:
                    # The rest of a line whose connection broke comes again.
                    read = stamped(line) if line.endswith(b"\n") else None
                    if read is None:
                        continue
                    moment, text = read
                    gap |= cursor.takes_gap(moment)
                    if cursor.is_new(moment):
                        new.append(text)
                if new:
                    self._recovered(pod.uid)
                    self._send(Lines(pod.uid, tuple(new), cursor.last, cursor.count, gap))
                if self._stopped.is_set():
                    return
        finally:
            stream.close()
