"""Validates, stores and dispatches what the relays of one host send."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from dtrain.engines.ssh import host_events, machine
from dtrain.engines.ssh.context import AttemptContext
from dtrain.engines.ssh.host_events import Post
from dtrain.engines.ssh.host_state import HostPhase, LinkState
from dtrain.engines.ssh.outage import Outage
from dtrain.engines.ssh.output import HostOutput
from dtrain.engines.ssh.worker_reports import WorkerReports
from dtrain.launchplan import names
from dtrain.launchplan.plan import HostPlan
from dtrain.messages import agent as messages
from dtrain.messages.decode import ProtocolError
from dtrain.messages.sequence import MessageSequence
from dtrain.node import protocol
from dtrain.records import shallow
from dtrain.runs import events
from dtrain.runs.storage import StorageError
from dtrain.runs.telemetry import last_time
from dtrain.session.relays.liveness import SupervisorLiveness
from dtrain.session.relays.relay import RelayChannel
from dtrain.session.watching.evidence import HostEvidence
from dtrain.session.watching.telemetry import HostTelemetry

Reported = Sequence[tuple[float, messages.Happened]]
"""Events of one host, each with the time at which it arrived (seconds since the epoch)."""


class Inbox:
    """Only the link's reader uses it."""

    def __init__(
        self,
        context: AttemptContext,
        part: HostPlan,
        evidence: HostEvidence,
        reports: WorkerReports,
        outage: Outage,
        step: Callable[[host_events.LinkEvent], object],
    ) -> None:
        """``step`` passes an event to the host's state machine."""
        self.output = HostOutput(part.host.name, context.folder, ranked=context.plan.job.ranked)
        self._telemetry = HostTelemetry(
            part.host.name,
            context,
            part.host.gpus,
            lambda until: self.output.note("telemetry", until),
        )
        self._context = context
        self._host = part.host.name
        self._evidence = evidence
        self._reports = reports
        self._outage = outage
        self._step = step
        self._sequence = MessageSequence(part, context.plan.world_size)
        timeout = context.plan.job.restart.node_timeout
        self._supervisor = SupervisorLiveness(self._host, timeout)
        self._journaled = 0
        """Offset of the host's events up to which the journal has them."""
        self._reported: Reported = ()

    def resume(self, offsets: Mapping[str, int], reported: Reported) -> None:
        """Continue a run from the given offsets. ``reported``: the events that earlier launchers
        got."""
        self._reported = reported
        self.output.offsets.update(offsets)
        # Not part of what an attempt has received: it may be from an earlier attempt.
        self.output.note("telemetry", last_time(self._context.folder.path, self._host))
        # The host sends all events again to rebuild the state. They are journaled only once.
        self._journaled = self.output.offsets.pop("events", 0)

    @property
    def end_is_known(self) -> bool:
        """Whether an earlier launcher knew that the host's part has ended."""
        return any(isinstance(happened.event, messages.Ended) for _, happened in self._reported)

    def recall(self) -> None:
        """Take the events that earlier launchers got: the host cannot send them again."""
        with suppress(ProtocolError):  # the journal has lost events
            for arrived, happened in self._reported:
                self._take_event(happened, arrived)

    def begin_relay(self) -> None:
        self._sequence.begin_relay()
        self.output.begin_relay()

    def take(
        self, frame: protocol.Message | protocol.Data, relay: RelayChannel, state: LinkState
    ) -> None:
        """Raises ProtocolError for data that contradicts the plan or earlier messages."""
        if isinstance(frame, protocol.Data):
            self._keep(frame)
            return
        message = messages.read_message(frame.body)
        self._sequence.check_message(message, started=state.started)
        match message:
            case messages.Hello():
                self._evidence.compare_clocks(message.time, time.time())
                relay.pid = message.pid
                hello = events.RelayHello(self._host, shallow(message))
                self._context.recorder.record(hello)
            case messages.StreamFound():
                self._sequence.check_stream(message)
                try:
                    self.output.add(message)
                except StorageError as error:
                    self._cannot_store(error)
            case messages.Happened():
                self._take_event(message, time.time())
            case messages.ProgressReport(name=name, offset=offset, said=said):
                self.output.note(name, offset)
                if self._reports.add(name, said):
                    self._evidence.last_activity = time.monotonic()
            case messages.Telemetry():
                self._telemetry.take(message)
            case messages.Alive(supervisor=pid, silent=silent, time=theirs):
                if theirs is not None:
                    self._evidence.compare_clocks(theirs, time.time())
                if state.phase in (HostPhase.RUNNING, HostPhase.STOPPING):
                    self._check_supervisor(pid or 0, silent)
            case messages.Notice(text=text):
                self._context.recorder.notice_of(self._host, text)
            case messages.RunSeen():
                raise ProtocolError("status: not requested")
            case _:
                if isinstance(message, messages.Attached):
                    self._outage.attached(time.monotonic())
                elif isinstance(message, messages.Refused):
                    self.recall()
                self._step(message)

    def _keep(self, frame: protocol.Data) -> None:
        try:
            kept = self.output.keep(frame)
        except StorageError as error:
            self._cannot_store(error)
            return
        if kept is not None:
            self._outage.progressed()
            self._evidence.last_activity = time.monotonic()
            self._context.recorder.observer.output(*kept)
            self._context.progress.add_output(kept[0], frame.payload)

    def _cannot_store(self, error: StorageError) -> None:
        # The job is about to be stopped, which still needs the host's events.
        self._context.posts.put(Post(machine.LauncherFailed(), error))

    def _take_event(self, message: messages.Happened, arrived: float) -> None:
        if not self._sequence.is_new(message):
            return
        offset, event = message.offset, message.event
        self.output.offsets["events"] = offset
        self._outage.progressed()
        if offset > self._journaled:
            happened = events.HostEvent(self._host, offset, event.as_json())
            self._context.recorder.record(happened)
        self._evidence.compare_clocks(event.time, arrived, current=False)
        self._evidence.add(event)
        match event:
            case messages.Exited():
                reporter = names.reporter_name(event.role, event.index, event.rank)
                self._context.steps.end(reporter)
                worker = machine.WorkerId(self._host, event.role, event.index)
                exited = machine.WorkerExited(worker, event.failed)
                self._context.posts.put(Post(exited, failures=self._evidence.failures(event)))
            case messages.Ended() | messages.Stopping():
                self._step(event)

    def _check_supervisor(self, pid: int, silent: float) -> None:
        notice, error = self._supervisor.hear(pid, silent)
        if notice:
            self._context.recorder.notice(notice)
        if error is not None:
            self._step(host_events.SupervisorTimedOut(error))
