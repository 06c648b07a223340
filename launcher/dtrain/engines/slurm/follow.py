"""Follows one Slurm job over connections to the login node, until Slurm has ended it.

One connection at a time leads to the program on the login node. When it breaks, the job goes on,
and the follower connects again. Requests to stop come from any thread; a writer thread sends them.
`SlurmJob` keeps what the program reports.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from dtrain.diagnostics import AnswerError, ConnectError, ExitCode, NodeError
from dtrain.engines.backoff import Backoff
from dtrain.engines.slurm import allocation, submission
from dtrain.engines.slurm.job import SlurmJob
from dtrain.engines.slurm.login import Login
from dtrain.engines.slurm.state import parse
from dtrain.failures.cause import Report
from dtrain.messages import slurm as messages
from dtrain.messages.agent import Bye, Event, Notice, ProgressReport, StreamFound, Telemetry
from dtrain.messages.decode import answer_of
from dtrain.node import protocol
from dtrain.node.slurm.orders import FirstOrder, LaterOrder, Submission
from dtrain.runs.events import CodeKnown
from dtrain.runs.storage import StorageError
from dtrain.session.relays.liveness import PingLimit
from dtrain.session.relays.relay import PING_SECONDS, CommandWriter, RelayChannel
from dtrain.session.stopping.control import Control, Force
from dtrain.transport.threads import blocking

FIRST_DELAY, LAST_DELAY = 1.0, 30.0
"""Seconds before the first and the later attempts to connect again."""
LOOK_SECONDS = 0.1
"""Seconds between two looks at the workers while messages arrive."""


class SlurmFollower:
    def __init__(self, job: SlurmJob, login: Login, control: Control) -> None:
        self._job = job
        self._login = login
        self._control = control
        self._writer = CommandWriter[LaterOrder](lambda: PingLimit.NORMAL, self._fail)
        self._look_at = 0.0
        self._full = False
        """Whether output is dropped: this machine cannot store it, and the job is to end."""
        self._unanswered = False
        """Whether the last command did not reach Slurm's controller."""

    # Requests, from any thread and from signal handlers ----------------------------------------

    def interrupt(self, why: str, force: Force) -> None:
        if self._gave_up:
            self.detach()
        else:
            self._send_request()

    def detach(self) -> None:
        # The login host may not answer: the end of the connection is all that its program needs.
        blocking.run(self._login.close)

    def _fail(self, bug: Exception) -> None:
        self._job.recorder.notice_once(f"cannot send a request to the login host: {bug!r}")

    def _send_request(self) -> None:
        if force := self._control.force:
            self._writer.send({"op": "cancel", "kill": force is Force.KILL})

    @property
    def _gave_up(self) -> bool:
        """Whether dtrain no longer waits for Slurm."""
        return self._control.force is Force.GIVE_UP

    @property
    def _goes_on(self) -> str:
        unknown = self._job.record.job_id is None
        return "the job may be submitted" if unknown else "the job goes on"

    # The connection ----------------------------------------------------------------------------

    def follow(self, order: Submission | None) -> Report:
        """Follow the job until it is over, or left. ``order`` submits it first."""
        job = self._job
        job.may_exist = order is None
        self._control.hand_to(self)
        if order is not None and self._control.force:
            return job.finish(Report(ExitCode.INTERRUPTED, self._control.why))
        self._writer.start()
        try:
            ended = self._follow(order)
        except StorageError as error:
            return job.leave_unstored(error)
        finally:
            self._writer.finish()
            self._writer.join(PING_SECONDS)
        return job.leave() if ended is None else job.finish(ended)

    def _follow(self, order: Submission | None) -> Report | None:
        """The report, or None if the job goes on without this process."""
        job, backoff = self._job, Backoff(FIRST_DELAY, LAST_DELAY)
        inside = job.record.request.allocation
        if order is not None and inside is not None:
            try:
                with job.recorder.awaited(self._login.answer):
                    allocation.check(inside, self._login.look(), len(job.plan.hosts))
            except NodeError as error:
                return job.failed(error)
        while True:
            new = order if job.record.job_id is None and not self._control.force else None
            files = job.files()
            try:
                if self._serve({**new, **files} if new else {**job.follow_order(), **files}):
                    if not job.has_restarted():
                        return job.ended(self._control.why if self._control.force else "")
                    job.begin_next_attempt()
                    backoff.reset()
                    continue
            except submission.SubmitError as error:
                return job.ended(self._control.why) if self._control.force else job.failed(error)
            except AnswerError as error:
                return job.failed(error)
            except StorageError as error:
                if not self._control.force:
                    raise
                self._full = True
                job.recorder.notice_once(error.message)
            except NodeError as error:
                if new and not (job.may_exist and isinstance(error, ConnectError)):
                    return job.failed(error)
                job.recorder.notice_once(f"{error.message}; {self._goes_on}, connecting again")
            if self._control.left:
                return None
            if self._gave_up:
                return job.given_up(self._control.why, job.still_there())
            self._control.wait(backoff.next())

    def _serve(self, order: FirstOrder) -> bool:
        """Handle what one program sends. Whether the job is over. Raises NodeError."""
        job = self._job
        job.output.begin_connection()
        with (
            job.recorder.awaited(self._login.answer) as answered,
            self._login.opened(order) as channel,
            self._writing_to(channel),
        ):
            existed, job.may_exist = job.may_exist, True
            # Requests that came before the writer had this connection are lost.
            if self._control.left or self._gave_up:
                return False
            self._send_request()
            with answer_of(self._login.name, "following the job"):
                for frame in channel.frames():
                    if isinstance(frame, protocol.Data):
                        if not self._full:
                            job.keep(frame)
                    elif self._handle(messages.read_message(frame.body)):
                        return True
                    if job.record.job_id is not None:
                        answered()
                    elif self._control.force:
                        later = "cancelling the job once Slurm says that it exists"
                        job.recorder.notice_once(f"{self._control.why}: {later}")
                    self._watch()
            if self._control.left or self._gave_up:
                return False
            job.may_exist = existed or channel.has_begun
            raise channel.failure()

    def _watch(self) -> None:
        # A look costs what all machines cost, and each machine sends messages.
        if (now := time.monotonic()) < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        watch = self._job.watch
        watch.look()
        while watch.orders:
            self._writer.send(watch.orders.pop(0))

    @contextlib.contextmanager
    def _writing_to(self, channel: RelayChannel) -> Iterator[None]:
        channel.pid = 0  # it answers pings from the start
        self._writer.relay = channel
        try:
            yield
        finally:
            self._writer.relay = None
            self._job.watch.update(None)
            self._job.watch.look()

    def _handle(self, message: messages.SlurmMessage) -> bool:
        """Whether this was the last message."""
        job = self._job
        match message:
            case messages.Submitted(number, uncertain):
                job.may_exist = number is not None or uncertain
                job.number(number)
            case messages.SubmitRefused():
                job.may_exist = message.uncertain
                raise submission.refusal(self._login.name, message)
            case messages.JobDescribed(text):
                if self._unanswered:
                    self._unanswered = False
                    job.recorder.notice(f"{self._login.name}: Slurm answers again")
                if job.update(parse(text) if text else None):
                    self._writer.send({"op": "finish"})
            case messages.Trouble(command, text):
                said = f"{self._login.name}: {command}: {text}"
                if not submission.is_unanswered(text):
                    job.recorder.notice_once(said)
                elif not self._unanswered:
                    self._unanswered = True
                    hint = submission.hint_for(text, self._login.name)
                    remedy = f"\nhint: {hint}" if hint else ""
                    job.recorder.notice(f"{said}; {self._goes_on}, trying again{remedy}")
            case messages.Cancelling():
                job.cancelling(self._control.why, kill=self._control.force >= Force.KILL)
            case messages.FromMachine(host, StreamFound() as found):
                if not self._full:
                    job.output.add(host, found)
            case messages.FromMachine(host, ProgressReport() as report):
                job.watch.worker_said(host, report)
            case messages.FromMachine(host, messages.TaskEnded(task, then)):
                job.task_ended(host, task, then)
            case messages.FromMachine(host, Notice(text)):
                job.watch.notice(host, text)
            case messages.FromMachine(host, (Telemetry() | Event()) as said):
                job.watch.machine_said(host, said)
            case messages.CodeOnLogin(found):
                job.recorder.record(CodeKnown(found))
            case messages.Unwatched(text):
                job.watch.unwatched = True
                said = f"no telemetry, and no stacks of a hang: {text}"
                job.recorder.notice_once(said, kind="unwatched")
            case messages.ScriptOutput(text):
                job.script_said(text)
            case Bye():
                return True
        return False
