"""What happens in a run, as values.

The journal keeps each `JournalEvent`: `JournalEvent.as_json` and `JournalEvent.from_json` are the
fields of its line. Another process may have damaged the line, so `from_json` checks each field.

Observers of a run get the events of `SHOWN` as they are, and in place of the others those that no
journal keeps: they have plans and samples, which are stored elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any, ClassVar, TypeAlias

from dtrain.checks import Finding
from dtrain.failures.cause import Report
from dtrain.failures.stacks import StackGroup
from dtrain.failures.stalls import Stall
from dtrain.failures.stragglers import Straggler
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.agent import Offset, Revision, Time
from dtrain.messages.decode import MAX_ITEMS, Length, ProtocolError, Range, decode
from dtrain.messages.telemetry import Sample
from dtrain.records import dataclass, shallow
from dtrain.runs import restart
from dtrain.runs.progress import Progress
from dtrain.spec.model import Notification

TRACEBACKS = 32
"""Failures of a report that keep their traceback in the journal. Users read the first ones."""
LONGEST = 1 << 16
"""Characters of each text in a report."""

AttemptNumber = Annotated[int, Range(1, 10**6)]


EVENTS: dict[str, type[JournalEvent]] = {}
"""All that follow, by kind."""


@dataclass(frozen=True, slots=True)
class JournalEvent:
    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        EVENTS[cls.kind] = cls

    def as_json(self) -> dict[str, Any]:
        """The fields, for `encode`."""
        return shallow(self)

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> JournalEvent:
        """Raises ProtocolError."""
        return decode(cls, body, cls.kind)


@dataclass(frozen=True, slots=True)
class RunStarted(JournalEvent):
    """The run has a name; nothing has been started on any host."""

    kind = "started"
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LauncherAttached(JournalEvent):
    """Another process on this machine has taken charge of the run."""

    kind = "attached"


@dataclass(frozen=True, slots=True)
class CodeKnown(JournalEvent):
    """The job's code: what ``job.sync`` sends, or what a login node of Slurm has."""

    kind = "code"
    revision: Revision


@dataclass(frozen=True, slots=True)
class NextAttempt(JournalEvent):
    """The job has failed and starts again."""

    kind = "attempt"
    attempt: AttemptNumber
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HostsAllocated(JournalEvent):
    """The engine has chosen the hosts."""

    kind = "allocated"
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HostState(JournalEvent):
    """A host has another state; a `ShownState`."""

    kind = "host"
    host: str
    state: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RelayHello(JournalEvent):
    """What a relay reported about itself when it started."""

    kind = "hello"
    host: str
    said: Any


@dataclass(frozen=True, slots=True)
class HostEvent(JournalEvent):
    """An event of a host's supervisor, see `dtrain.messages.agent`."""

    kind = "event"
    host: str
    offset: Offset
    """Where the next event begins in the host's own file."""
    said: Any


@dataclass(frozen=True, slots=True)
class NoticeShown(JournalEvent):
    """A sentence for the user."""

    kind = "notice"
    text: str


@dataclass(frozen=True, slots=True)
class TensorBoardAddress(JournalEvent):
    """Where the TensorBoard of a host can be seen on this machine."""

    kind = "tensorboard"
    host: str
    text: str


@dataclass(frozen=True, slots=True)
class Findings(JournalEvent):
    """The result of the check before the launch."""

    kind = "findings"
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Progressed(JournalEvent):
    """The training progress of the process that represents the job."""

    kind = "progress"
    report: Progress

    def as_json(self) -> dict[str, Any]:
        return {"process": self.report.process, "said": self.report.as_json()}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> JournalEvent:
        said = body.get("said")
        if not isinstance(said, dict):
            raise ProtocolError(f"{cls.kind}: said is no object")
        return cls(Progress.read(body.get("process"), said))


@dataclass(frozen=True, slots=True)
class PhasesSpent(JournalEvent):
    """What the first process of the job did besides steps, since it began."""

    kind = "phases"
    at: Time
    """Seconds since the epoch, on the host's clock."""
    step: Annotated[int, Range(0, 1 << 63)]
    """The last step that it had done."""
    seconds: Annotated[Mapping[str, Annotated[float, Range(0, 1e7)]], Length(8)]
    """By phase, see `dtrain.runtime.steps.PHASES`."""
    process: str = ""
    """Which one it is; empty from an earlier version."""


@dataclass(frozen=True, slots=True)
class StragglersChanged(JournalEvent):
    """The slow ranks have changed; None: no rank is slow any more."""

    kind = "stragglers"
    found: Straggler | None


@dataclass(frozen=True, slots=True)
class StallChanged(JournalEvent):
    """The job or some ranks stand still; None: they go on."""

    kind = "stall"
    found: Stall | None


@dataclass(frozen=True, slots=True)
class HangDetected(JournalEvent):
    """No worker has written output or reported progress for as long as `job.watchdog` allows."""

    kind = "hang"
    seconds: Annotated[float, Range(0, 1e9)]
    """Since the last output."""
    ends: bool
    """Whether the attempt ends because of it."""


@dataclass(frozen=True, slots=True)
class StacksReported(JournalEvent):
    """Where the workers were when a user asked for it."""

    kind = "stacks"
    groups: tuple[StackGroup, ...]
    notes: tuple[str, ...]
    """What else is known: collectives that ranks have not joined, workers without a stack."""


@dataclass(frozen=True, slots=True)
class StopRequested(JournalEvent):
    """The user or a signal stops the attempt."""

    kind = "stopping"
    why: str


@dataclass(frozen=True, slots=True)
class AttemptFailed(JournalEvent):
    """An attempt has ended, and another one follows."""

    kind = "failed"
    number: AttemptNumber
    attempt: restart.AttemptResult
    report: Report

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "attempt": asdict(self.attempt),
            **asdict(_shortened(self.report)),
        }

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> JournalEvent:
        return decode(cls, {**body, "report": body}, cls.kind)


@dataclass(frozen=True, slots=True)
class Notified(JournalEvent):
    """A notification is about to be sent. It is journaled first: none is sent twice."""

    kind = "notified"
    on: Notification
    attempt: AttemptNumber


@dataclass(frozen=True, slots=True)
class Cleaned(JournalEvent):
    """`dtrain stop` ended what a finished run had left, as far as it could."""

    kind = "cleaned"
    problems: tuple[str, ...] | None = None
    """The problems in the run's report now; None from an earlier version."""
    hint: str = ""
    """The hint in the run's report now."""


@dataclass(frozen=True, slots=True)
class Finished(JournalEvent):
    """The run is over."""

    kind = "finished"
    report: Report

    def as_json(self) -> dict[str, Any]:
        return asdict(_shortened(self.report))

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> JournalEvent:
        return cls(decode(Report, body, cls.kind))


SHOWN = (
    LauncherAttached, HostState, NoticeShown, TensorBoardAddress, Findings, StragglersChanged,
    StallChanged, StacksReported, Finished,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunLaunched:
    """The run has a name and a folder. No host has started anything yet."""

    run: str
    plan: LaunchPlan
    folder: str


@dataclass(frozen=True, slots=True)
class RunAttached:
    """Replaces `RunLaunched` for a run that was launched before."""

    run: str
    plan: LaunchPlan
    folder: str


@dataclass(frozen=True, slots=True)
class AttemptPlanned:
    """The job failed and restarts: `NextAttempt` with its plan."""

    plan: LaunchPlan


@dataclass(frozen=True, slots=True)
class HostsPlanned:
    """The engine has chosen the hosts: `HostsAllocated` with the plan that names them."""

    plan: LaunchPlan


@dataclass(frozen=True, slots=True)
class OutputFollows:
    """Replaces `RunLaunched` if only the output of these workers is shown."""

    plan: LaunchPlan


@dataclass(frozen=True, slots=True)
class ProgressReported:
    """A worker reports its progress."""

    host: str
    report: Progress
    followed: bool = False
    """Whether the next report follows at once: this one only gives it a rate."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a host does now. Comes once a second from each host that runs."""

    host: str
    sample: Sample


@dataclass(frozen=True, slots=True)
class RunLeft:
    """Replaces `Finished` if the run continues."""

    run: str
    still_running: bool | None = True
    """None if no host can be reached."""


RunEvent: TypeAlias = (
    JournalEvent
    | RunLaunched
    | RunAttached
    | AttemptPlanned
    | HostsPlanned
    | OutputFollows
    | ProgressReported
    | Sampled
    | RunLeft
)


def _shortened(report: Report) -> Report:
    """A report that `JournalReader` accepts: hundreds of workers may fail with long texts."""
    return replace(
        report,
        reason=report.reason[:LONGEST],
        hint=report.hint[:LONGEST],
        problems=tuple(text[:LONGEST] for text in report.problems[:MAX_ITEMS]),
        failures=tuple(
            replace(
                failure,
                message=failure.message[:LONGEST],
                traceback=failure.traceback[-LONGEST:] if place < TRACEBACKS else "",
            )
            for place, failure in enumerate(report.failures[:MAX_ITEMS])
        ),
    )
