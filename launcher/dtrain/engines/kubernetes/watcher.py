"""Runs the program that watches one pod, see `dtrain.node.pods.watcher`."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from dtrain.diagnostics import AuthError, ConnectError, NodeError
from dtrain.engines.backoff import Backoff
from dtrain.engines.kubernetes.client import Client
from dtrain.engines.kubernetes.objects import Pod
from dtrain.engines.kubernetes.pod_programs import PodConnection, PodProcess
from dtrain.engines.kubernetes.routines import InThread, Pause, Routine, finish
from dtrain.engines.kubernetes.script import RUN_FOLDER
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages import pods as messages
from dtrain.messages.agent import Bye, ProgressReport
from dtrain.messages.decode import answer_of
from dtrain.node import protocol
from dtrain.node.pods.orders import PodOrder, WatchPod
from dtrain.records import dataclass
from dtrain.session.relays.liveness import PingLimit
from dtrain.session.relays.relay import CommandWriter, RelayChannel
from dtrain.transport import node_program

ATTEMPTED = "watching its processes"
FIRST_DELAY, LAST_DELAY = 1.0, 15.0
"""Seconds before the first and the later attempts to start the program again."""
PATIENCE = 4
"""Attempts in sequence after which the user hears that the pod is not watched."""
END_SECONDS = 5.0
"""Seconds after a refusal in which the end of the pod explains it."""

MAX_FILES = 4096
"""Progress files of one pod that are continued."""


@dataclass(frozen=True, slots=True)
class WatcherSaid:
    uid: str
    """Of the pod."""
    message: messages.PodMessage


@dataclass(frozen=True, slots=True)
class WatcherFailed:
    """The pod is not watched, for now or for good."""

    uid: str
    error: NodeError


@dataclass(frozen=True, slots=True)
class WatcherEnded:
    """Nothing more comes."""

    uid: str


WatcherEvent = WatcherSaid | WatcherFailed | WatcherEnded


class PodWatcher:
    """A routine runs it, and any thread sends orders."""

    def __init__(
        self,
        client: Client,
        plan: LaunchPlan,
        pod: Pod,
        over: threading.Event,
        open_: Callable[[Callable[[], Any]], Routine[Any]],
        report: Callable[[WatcherEvent], Routine[None]],
        *,
        attached: bool,
    ) -> None:
        """``over``: set once the container has ended. ``open_``: makes a call that connects to the
        pod. ``attached``: begin with the last report in
        each progress file."""
        self._client, self._pod, self._over = client, pod, over
        self._open, self._report = open_, report
        part = plan.hosts[pod.index]
        self._host, self._python = part.host.name, plan.agent_python(part)
        self._order: WatchPod = {
            "folder": RUN_FOLDER,
            "world_size": plan.world_size,
            "offsets": {},
            "attached": attached,
        }
        self._writer = CommandWriter[PodOrder](lambda: PingLimit.NORMAL, self._cannot_send)
        self._connection: PodConnection | None = None
        self._closed = False
        self._begun = math.inf
        """When the program was first heard."""

    @property
    def reachable(self) -> bool:
        """Whether reports of the workers arrive."""
        relay = self._writer.relay
        return relay is not None and relay.has_begun and not relay.quiet

    def send(self, order: PodOrder) -> None:
        self._writer.send(order)

    def close(self) -> None:
        """End the program; the pod goes on."""
        self._closed = True
        if (connection := self._connection) is not None:
            connection.close()

    def run(self) -> Routine[None]:
        """Report what the program says until the pod has ended."""
        backoff = Backoff(FIRST_DELAY, LAST_DELAY)
        failed = 0
        self._writer.start()
        try:
            while not (self._closed or self._over.is_set()):
                self._begun = math.inf
                try:
                    yield from self._follow()
                except NodeError as error:
                    lost = isinstance(error, ConnectError | AuthError)
                    refused = self._begun == math.inf and not lost
                    if refused and (yield Pause(END_SECONDS, self._over)):
                        break
                    failed += 1
                    if refused or failed == PATIENCE:
                        yield from self._report(WatcherFailed(self._pod.uid, error))
                    if refused:
                        break
                if time.monotonic() > self._begun + LAST_DELAY:
                    failed = 0
                    backoff.reset()
                yield Pause(backoff.next(), self._over)
        finally:
            self._writer.finish()
        yield from self._report(WatcherEnded(self._pod.uid))

    def _follow(self) -> Routine[None]:
        """Report what one program says. Raises NodeError."""
        self._connection = connection = PodConnection(self._client, self._host, self._pod.name)
        try:
            if self._closed:
                return
            process = yield from self._open(lambda: self._start(connection))
            relay = RelayChannel(self._host, connection, process, self._python, ATTEMPTED)
            self._writer.relay = relay
            yield from self._hear(process, relay)
        finally:
            self._writer.relay = None
            connection.close()

    def _start(self, connection: PodConnection) -> PodProcess:
        process = node_program.start(connection, "pod", self._python, label="watch")
        process.write(protocol.encode_command(self._order))
        assert isinstance(process, PodProcess)  # noqa: S101 (types)
        return process

    def _hear(self, process: PodProcess, relay: RelayChannel) -> Routine[None]:
        with answer_of(self._host, ATTEMPTED):
            data: bytes | ConnectError = b""
            while True:
                relay.wait()
                try:
                    data = yield from process.reading()
                except ConnectError as error:
                    data = error
                finally:
                    if relay.has_begun:
                        self._begun = min(self._begun, time.monotonic())
                if not (chunk := relay.hear(data)):
                    break
                for body in relay.messages_in(chunk):
                    self._begun = min(self._begun, time.monotonic())
                    relay.pid = 0  # it answers pings from now on
                    message = messages.read_message(body)
                    if isinstance(message, Bye):
                        return
                    if isinstance(message, ProgressReport):
                        self._keep_offset(message)
                    yield from self._report(WatcherSaid(self._pod.uid, message))
        if not self._closed:
            raise (yield InThread(relay.failure))

    def _keep_offset(self, report: ProgressReport) -> None:
        """The next program goes on there."""
        offsets = self._order["offsets"]
        if report.name in offsets or len(offsets) < MAX_FILES:
            offsets[report.name] = report.offset

    def _cannot_send(self, bug: Exception) -> None:
        error = ConnectError(self._host, ATTEMPTED, f"cannot send an order: {bug!r}")
        finish(self._report(WatcherFailed(self._pod.uid, error)))
