"""Reads from the API server: the pods, the job, and the log of each pod.

Each routine tries again for as long as it is asked to: a server that is down, a token that has
expired and a watch that ends do not end a job.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from dtrain.diagnostics import AuthError, ConnectError, NodeError, PrepareError
from dtrain.engines.backoff import Backoff
from dtrain.engines.kubernetes import objects
from dtrain.engines.kubernetes.client import Client, ForbiddenError, GoneError, NotFoundError
from dtrain.engines.kubernetes.kinds import EVENTS, PODS
from dtrain.engines.kubernetes.kueue import Queue
from dtrain.engines.kubernetes.launched import LaunchedJob
from dtrain.engines.kubernetes.line_stream import MAX_LINE, LineStream, QuietError
from dtrain.engines.kubernetes.lines import Cursor, stamped
from dtrain.engines.kubernetes.objects import KubernetesJobState, Pod
from dtrain.engines.kubernetes.routines import InThread, Pause, Routine, Routines
from dtrain.engines.kubernetes.script import BEGINS
from dtrain.engines.kubernetes.watcher import PodWatcher, WatcherEvent
from dtrain.launchplan.plan import LaunchPlan
from dtrain.launchplan.pods import REPLICATED_JOB, child_job
from dtrain.messages.decode import ProtocolError, decode, parse_object
from dtrain.records import dataclass

FIRST_DELAY, LAST_DELAY = 0.5, 15.0
"""Seconds before the first and the later attempts to ask again."""
JOB_SECONDS = 1.0
"""Seconds between two questions for the state of the job."""
WARNINGS_SECONDS = 5.0
"""Seconds between two questions for warnings."""
REREAD_SECONDS = 1.0
"""Seconds between two reads of a log that cannot be followed."""
CREATION_SECONDS = 2.0
"""Longest pause between two questions for the log of a container that is being created."""
WATCH_SECONDS = 240
"""Seconds after which the server ends a watch, and the next one begins."""
_BEGINS = f"{BEGINS}\n".encode()
MAX_PROBLEM = 500
"""Bytes of a kubelet's message that are shown."""
MAX_WAITING = 1000
"""Pieces of output that wait for the thread that stores them."""
FULL_SECONDS = 0.1
"""Seconds between two attempts to add one."""
MAX_OPENING = 64
"""Logs and programs of pods that are opened at the same time, each in a thread."""
OPENING_SECONDS = 0.1
"""Seconds between two attempts to open another one."""


@dataclass(frozen=True, slots=True)
class PodsListed:
    """All pods of the job."""

    pods: tuple[Pod, ...]


@dataclass(frozen=True, slots=True)
class PodChanged:
    pod: Pod
    removed: bool
    """Whether the pod is gone; ``pod`` is its last state."""


@dataclass(frozen=True, slots=True)
class JobSeen:
    """None: there is no such job."""

    state: KubernetesJobState | None
    reason: str = ""
    """Why a queue holds the job back."""


@dataclass(frozen=True, slots=True)
class PodLines:
    """New lines of a pod's log, and the position after them."""

    uid: str
    lines: tuple[bytes, ...]
    last: int
    count: int
    latest: int
    gap: bool = False
    """Whether lines before them are missing."""


@dataclass(frozen=True, slots=True)
class LogProblem:
    """What a kubelet writes instead of a log."""

    uid: str
    text: str


@dataclass(frozen=True, slots=True)
class LogEnded:
    uid: str
    whole: bool
    """Whether the log was read until its container ended."""


@dataclass(frozen=True, slots=True)
class Warned:
    """Why pods are missing, or why one does not start."""

    text: str
    pod: str = ""


@dataclass(frozen=True, slots=True)
class ServerNotice:
    """The API server does not answer, or answers again."""

    text: str


RECOVERED = ServerNotice("the API server answers again")


PodEvent = (
    PodsListed
    | PodChanged
    | JobSeen
    | PodLines
    | LogProblem
    | LogEnded
    | Warned
    | ServerNotice
    | WatcherEvent
)


class Readers:
    """The routines of one run. Their events arrive in `events`."""

    def __init__(self, client: Client, launched: LaunchedJob) -> None:
        self._client = client
        self._launched = launched
        self._routines = Routines("dtrain-kubernetes")
        self._stopped = False
        self.events: queue.Queue[PodEvent] = queue.Queue(MAX_WAITING)
        self._troubled: set[str] = set()
        self._opening = 0
        self._queue = Queue(client, launched.name)
        self.pods_missing = False
        """Whether to ask why pods are missing."""
        self.slow_pod = ""
        """A pod to ask why it does not start."""
        self._warnings_due = 0.0
        self._watchers: list[PodWatcher] = []

    def start(self) -> None:
        self._start("pods", "pods", self._watch_pods)
        self._start("job", "job", self._ask_for_job)

    def stop(self) -> None:
        self._stopped = True
        for watcher in self._watchers:
            watcher.close()
        self._routines.stop()

    def _start(self, source: str, name: str, run: Callable[[], Routine[None]]) -> None:
        self._routines.start(self._run_to_end(source, name, run))

    def _run_to_end(
        self, source: str, name: str, run: Callable[[], Routine[None]]
    ) -> Routine[None]:
        while True:
            try:
                yield from run()
            except Exception as error:  # noqa: BLE001 (a defect must not end it in silence)
                text = f"reading {name} failed: {type(error).__name__}: {error}"
                yield from self._trouble(source, text, always=True)
                yield Pause(LAST_DELAY)
            else:
                return

    def _send(self, event: PodEvent) -> Routine[None]:
        while not self._stopped:
            try:
                self.events.put_nowait(event)
            except queue.Full:
                yield Pause(FULL_SECONDS)
            else:
                return

    def _trouble(
        self, source: str, error: Exception | str, *, always: bool = False
    ) -> Routine[None]:
        """Report the first trouble of all sources. ``always``: report any other one, too."""
        report = always or not self._troubled
        self._troubled.add(source)
        if report:
            why = error.message if isinstance(error, NodeError) else str(error)
            hint = f"; {error.hint}" if isinstance(error, ForbiddenError) and error.hint else ""
            yield from self._send(ServerNotice(f"{why}; the job goes on, trying again{hint}"))

    def _recovered(self, source: str) -> Routine[None]:
        last = self._troubled == {source}
        self._troubled.discard(source)
        if last:
            yield from self._send(RECOVERED)

    # The job and its pods --------------------------------------------------------------------

    def _ask_for_job(self) -> Routine[None]:
        backoff = Backoff(FIRST_DELAY, LAST_DELAY)
        while True:
            try:
                state = yield InThread(self._launched.state)
            except NodeError as error:
                yield from self._trouble("job", error)
                yield Pause(backoff.next())
                continue
            yield from self._recovered("job")
            waits = state.uid if state is not None and state.suspended else ""
            reason = (yield InThread(partial(self._queue.reason, waits))) if waits else ""
            yield from self._send(JobSeen(state, reason))
            yield from self._ask_for_warnings()
            backoff.reset()
            yield Pause(JOB_SECONDS)

    def _ask_for_warnings(self) -> Routine[None]:
        name = self._launched.name
        wanted = [(name, ""), (child_job(name), "")] if self.pods_missing else []
        wanted += [(self.slow_pod, self.slow_pod)] if self.slow_pod else []
        if not wanted or time.monotonic() < self._warnings_due:
            return
        self._warnings_due = time.monotonic() + WARNINGS_SECONDS
        with contextlib.suppress(NodeError, ProtocolError):  # not everybody may read events
            for name, pod in wanted:
                fields = f"involvedObject.name={name}"
                ask = partial(self._client.request, "GET", EVENTS, fieldSelector=fields)
                for text in objects.warnings((yield InThread(ask)), of_pod=bool(pod)):
                    yield from self._send(Warned(text, pod))

    def _watch_pods(self) -> Routine[None]:
        backoff = Backoff(FIRST_DELAY, LAST_DELAY)
        version = ""
        while True:
            try:
                if not version:
                    version = yield from self._list_pods()
                version = yield from self._follow_pods(version)
                backoff.reset()
                # A server that ends each watch at once is not asked all the time.
                yield Pause(FIRST_DELAY / 5)
            except QuietError:
                continue  # the connection may be broken: go on at the same version
            except GoneError:
                version = ""
                yield Pause(FIRST_DELAY)
            except (NodeError, ProtocolError) as error:
                version = ""
                yield from self._trouble("pods", error)
                yield Pause(backoff.next())

    def _list_pods(self) -> Routine[str]:
        selector = self._launched.selector
        ask = partial(self._client.request, "GET", PODS, labelSelector=selector)
        found = objects.object_list((yield InThread(ask)))
        yield from self._send(PodsListed(objects.pods(found)))
        return found.version

    def _follow_pods(self, version: str) -> Routine[str]:
        """Watch until the server ends the watch. Returns the version to go on from. Raises
        GoneError, other NodeErrors and ProtocolError."""
        watch = partial(
            self._client.stream,
            PODS,
            watch="true",
            labelSelector=self._launched.selector,
            resourceVersion=version,
            timeoutSeconds=WATCH_SECONDS,
            allowWatchBookmarks="true",
        )
        stream: LineStream = yield InThread(watch)
        with contextlib.closing(stream):
            # Not before: a user who may list pods may not watch them.
            yield from self._recovered("pods")
            while lines := (yield from stream.read()):
                for line in lines:
                    if not line.endswith(b"\n"):
                        return version
                    event = decode(objects.WatchEvent, parse_object(line), "event")
                    if event.type == "ERROR":
                        status = objects.without_nulls(event.object)
                        ended = decode(objects.WatchError, status, "status")
                        kind = GoneError if ended.code == 410 else ConnectError
                        raise kind(self._client.host, "watching the pods", ended.message)
                    version = event.version or version
                    if event.type != "BOOKMARK" and (pod := objects.pod(event.object)) is not None:
                        yield from self._send(PodChanged(pod, removed=event.type == "DELETED"))
        return version

    def watch(
        self, plan: LaunchPlan, pod: Pod, over: threading.Event, *, attached: bool
    ) -> PodWatcher:
        """Watch the processes of ``pod``. For ``over`` and ``attached`` see `PodWatcher`."""
        watcher = PodWatcher(
            self._client, plan, pod, over, self._open, self._send, attached=attached
        )
        self._watchers.append(watcher)
        self._start(pod.uid, f"{pod.name}-watcher", watcher.run)
        return watcher

    # Logs ------------------------------------------------------------------------------------

    def read_log(self, pod: Pod, cursor: Cursor, over: threading.Event) -> None:
        """Read the log of ``pod`` from ``cursor`` on. ``over``: set once its container has ended;
        the log that is read from then on is the whole one."""
        self._start(pod.uid, pod.name, lambda: self._read_log(pod, cursor, over))

    def _read_log(self, pod: Pod, cursor: Cursor, over: threading.Event) -> Routine[None]:
        backoff = Backoff(FIRST_DELAY, LAST_DELAY)
        whole = False
        follow = True
        previous = failed = False
        while True:
            complete = previous or over.is_set()
            try:
                whole = yield from self._stream_log(pod, cursor, follow=follow, previous=previous)
                failed = False
                backoff.reset()
                yield from self._recovered(pod.uid)
                if complete and (whole or not follow):
                    break
                # Kubelets that can watch no more files cannot follow a log, but they can read it.
                follow = whole or not complete
                yield Pause(REREAD_SECONDS, over)
            except _StartedAgainError:
                previous = True
            except QuietError:
                whole = False
            except NotFoundError:
                whole = False  # its stream may have ended before its container
                break
            except ForbiddenError as error:
                yield from self._trouble(pod.uid, error)
                if complete:
                    yield from self._send(LogEnded(pod.uid, whole=False))
                    return
                yield Pause(backoff.next(), over)
            except (ConnectError, AuthError) as error:
                whole = False
                # Load balancers cut quiet streams, which can be opened again.
                if failed:
                    yield from self._trouble(pod.uid, error)
                failed = True
                yield Pause(backoff.next())
            except NodeError:
                # The container is being created, or its log is gone.
                if complete:
                    break
                yield Pause(min(CREATION_SECONDS, backoff.next()), over)
        yield from self._recovered(pod.uid)
        yield from self._send(LogEnded(pod.uid, whole))

    def _stream_log(
        self, pod: Pod, cursor: Cursor, *, follow: bool, previous: bool
    ) -> Routine[bool]:
        """Whether the stream had nothing but the log. ``previous``: of the container that ended
        before it was started again. Raises _StartedAgainError for the log of the new one."""
        since = {"sinceTime": cursor.since} if cursor.since else {}
        clean = True
        stream = yield from self._log_of(
            pod, follow=follow, previous=previous, timestamps="true", **since
        )
        cursor.begin()
        with contextlib.closing(stream):
            while lines := (yield from stream.read()):
                # Before the cursor moves: the server may not answer, and these lines come again.
                for line in () if previous else lines:
                    if (yield from self._starts_again(pod, cursor, line)):
                        raise _StartedAgainError
                new: list[bytes] = []
                gap = False
                for line in lines:
                    if len(line) > MAX_LINE:  # of no process: the script writes pieces
                        problem = f"a line is cut after {MAX_LINE:,} bytes"
                        yield from self._send(LogProblem(pod.uid, problem))
                        line = line[:MAX_LINE] + b"\n"
                    read = stamped(line)
                    if read is None or not line.endswith(b"\n"):
                        clean = False
                        # A stream may end within a line, which comes again.
                        if read is None and not line[:1].isdigit():
                            problem = line[:MAX_PROBLEM].decode(errors="replace").strip()
                            yield from self._send(LogProblem(pod.uid, problem))
                        continue
                    moment, text = read
                    gap |= cursor.takes_gap(moment)
                    if cursor.is_new(moment):
                        new.append(text)
                if new:
                    yield from self._recovered(pod.uid)
                    position = (cursor.last, cursor.count, cursor.latest)
                    yield from self._send(PodLines(pod.uid, tuple(new), *position, gap))
        return clean

    def _starts_again(self, pod: Pod, cursor: Cursor, line: bytes) -> Routine[bool]:
        """Whether this line of a pod's log is new, and the first one of a container that is not the
        pod's first one."""
        if not (self._launched.restarts_containers and line.endswith(_BEGINS)):
            return False
        read = stamped(line)
        if read is None or read[0] <= cursor.latest or read[1] != _BEGINS:
            return False
        try:
            (yield from self._log_of(pod, previous=True, limitBytes="1")).close()
        except PrepareError:  # there was none
            return False
        return True

    def _log_of(
        self, pod: Pod, *, follow: bool = False, previous: bool, **query: str
    ) -> Routine[LineStream]:
        query |= {"previous": "true"} if previous else {"follow": str(follow).lower()}
        path = f"{PODS}/{pod.name}/log"
        ask = partial(self._client.stream, path, container=REPLICATED_JOB, **query)
        stream: LineStream = yield from self._open(ask)
        return stream

    def _open(self, call: Callable[[], Any]) -> Routine[Any]:
        """What ``call`` returns or raises that opens a connection to a pod."""
        while self._opening >= MAX_OPENING:
            yield Pause(OPENING_SECONDS)
        self._opening += 1
        try:
            return (yield InThread(call))
        finally:
            self._opening -= 1


class _StartedAgainError(Exception):
    """A log is not that of a pod's first container, whose end counts."""
