"""Find what ended a run from the reports of all hosts. Pure.

When one worker of a distributed job fails, the others fail within milliseconds, and each blames
its peer. The first cause is the earliest failure that is not such an echo.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from dtrain import hostlist
from dtrain.diagnostics import ExitCode
from dtrain.failures.catalogue import End, Explanation, explain
from dtrain.failures.kernel import KernelMessage
from dtrain.failures.stragglers import Straggler
from dtrain.launchplan import names
from dtrain.launchplan.plan import LaunchPlan
from dtrain.records import dataclass
from dtrain.wording import counted

SIGNALLED = 128
"""A shell reports a signal as this exit status plus the signal's number."""

# These signals mean that a launcher or an operator ended the worker.
_ASKED_TO_END = {"SIGTERM", "SIGINT", "SIGHUP"}


_SILENT = (
    "it wrote nothing to stderr about its end\n"
    "`dtrain logs` shows its other output; let the program print an error before it exits"
)


_ENDED_EARLY = (
    "some ranks ended while others still needed them\n"
    "all ranks must do the same number of steps: look for an early exit, data of different length,"
    " and a checkpoint that only some hosts have"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """One process that failed."""

    host: str
    role: str
    index: int
    rank: int | None
    time: float
    """Seconds since the epoch on the launching machine's clock (offsets corrected)."""
    code: int | None = None
    """Exit status; None if a signal ended it."""
    signal: str | None = None
    """Name such as ``SIGKILL``."""
    message: str = ""
    """Last line of its output, such as ``ValueError: bad batch``."""
    traceback: str = ""
    """What it wrote about its end, unchanged (may contain control characters)."""
    pid: int | None = None
    out_of_memory: bool = False
    """Whether the kernel's OOM killer killed a process on that host at that time."""
    kernel: KernelMessage | None = None
    """What the host's kernel logged about it."""

    @property
    def label(self) -> str:
        return names.label(self.role, self.index, self.rank)

    @property
    def who(self) -> str:
        """``rank 3 on gpu01``, ``ps1 on gpu02``."""
        return f"{f'rank {self.rank}' if self.rank is not None else self.label} on {self.host}"

    @property
    def summary(self) -> str:
        """``rank 3 on gpu01 was killed by SIGKILL``."""
        return f"{self.who} {self.how}"

    @property
    def how(self) -> str:
        """``exited with status 1``, ``was killed by SIGKILL``."""
        if self.kernel is not None and self.kernel.out_of_memory:
            return "was killed by the kernel's out-of-memory killer"
        if self.ended_by == "SIGKILL" and self.out_of_memory:
            return "was killed: out of memory"
        if self.signal is not None:
            return f"was killed by {self.signal}"
        if self.code is not None:
            return f"exited with status {self.code}"
        return "failed"

    @property
    def ended_by(self) -> str | None:
        """The signal that ended it, even if a shell or a container reports it as a status."""
        if self.signal is None and self.code is not None:
            return signal_name(self.code - SIGNALLED)
        return self.signal

    @property
    def crashed(self) -> bool:
        """Whether a signal ended it that is not a request to end."""
        return self.ended_by is not None and self.ended_by not in _ASKED_TO_END

    @property
    def cut_off(self) -> bool:
        """Whether it may have been stopped because another process failed, or on request: with
        TERM, and then with KILL."""
        return self.ended_by in ("SIGTERM", "SIGKILL") and not self.out_of_memory

    @property
    def words(self) -> str:
        """All of its output about its end."""
        return f"{self.message}\n{self.traceback}".strip()

    @property
    def explanation(self) -> Explanation | None:
        """The explanation from the catalogue or the kernel's message."""
        known = explain(End(self.code, self.ended_by, self.out_of_memory, self.words))
        logged = self.kernel
        if logged is None or (logged.weak and known is not None and not known.echo):
            return known
        return Explanation(logged.id, logged.what, logged.remedy, echo=False, host=logged.host)

    @property
    def is_echo(self) -> bool:
        """Whether another process's failure caused it."""
        return self.explanation is not None and self.explanation.echo

    @property
    def host_at_fault(self) -> bool:
        """Whether the host is at fault, so that another host would help."""
        return self.explanation is not None and self.explanation.host

    @property
    def hint(self) -> str:
        """What happened and what to do about it, one line each; empty if unknown."""
        known = self.explanation
        if known is not None:
            return f"{known.what}\n{known.remedy}"
        return _SILENT if self.code and not (self.words or self.ended_by) else ""

    def as_json(self) -> dict[str, Any]:
        known = self.explanation
        return asdict(self) | {"explanation": asdict(known) if known is not None else None}


@dataclass(frozen=True, slots=True)
class Report:
    """How a run ended. ``failures`` starts with the first cause."""

    exit_code: ExitCode
    reason: str
    """One sentence: ``all 4 workers finished``, ``rank 3 on gpu01 exited with status 1``."""
    failures: tuple[Failure, ...] = ()
    problems: tuple[str, ...] = ()
    """Hosts that failed, were lost, or could not be cleaned up: one message each. Only warnings if
    the job has done its work: a host was lost after its workers had finished."""
    hint: str = ""
    seconds: float = 0.0
    logs: str = ""
    """The run's folder on this machine."""
    stragglers: Straggler | None = None
    """The ranks that were slow when the run ended."""

    @property
    def ok(self) -> bool:
        """Whether the job has done its work."""
        return self.exit_code is ExitCode.OK

    @property
    def state(self) -> str:
        """``done``, ``failed`` or ``stopped``."""
        if self.ok:
            return "done"
        return "stopped" if self.exit_code is ExitCode.INTERRUPTED else "failed"

    def as_json(self) -> dict[str, Any]:
        """The report for programs. A failure's ``explanation`` is null if its kind is unknown."""
        return {
            "exit_code": int(self.exit_code),
            "reason": self.reason,
            "failures": [failure.as_json() for failure in self.failures],
            "problems": list(self.problems),
            "hint": self.hint,
            "logs": self.logs,
            "seconds": round(self.seconds, 3),
            "stragglers": None if self.stragglers is None else asdict(self.stragglers),
        }

    @property
    def run(self) -> str:
        """The run's name; empty if it never began."""
        return self.logs.rpartition("/")[2]


LEFT = Report(ExitCode.INTERRUPTED, "left")
"""Of a process that no longer follows a run, which goes on."""


def signal_name(number: int) -> str | None:
    """``SIGKILL`` for 9; None for a number that is no signal, or has no name of its own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return None


def all_finished(plan: LaunchPlan) -> str:
    """The reason of a report after success."""
    if any(plan.job.serves(part.node_rank) for part in plan.hosts):
        first = plan.hosts[0]
        its = counted(sum(process.ranks for process in first.processes), "worker")
        return f"{its} on {first.host.name}, the first host, finished"
    count = plan.world_size
    return "the worker finished" if count == 1 else f"all {count} workers finished"


CLOSE = 0.05
"""Seconds within which the clocks of two hosts cannot tell who failed first."""


def in_order_of_blame(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Sort failures, first cause first: by kind (own fault, asked to end, echo), then by time.

    Clocks cannot order failures on several hosts that are less than `CLOSE` apart. Of those, a
    crash comes first, because peers notice it within milliseconds, and then a failure with output
    before one without.
    """
    ordered = sorted(failures, key=lambda failure: (_kind(failure), failure.time))
    if not ordered:
        return ()
    earliest = ordered[0]
    at_once = [
        failure
        for failure in ordered
        if _kind(failure) == _kind(earliest)
        and failure.time <= earliest.time + CLOSE
        # Two failures on one host are ordered correctly by its clock.
        and (failure is earliest or failure.host != earliest.host)
    ]
    first = min(at_once, key=lambda failure: (not failure.crashed, not failure.words))
    ordered.remove(first)
    return (first, *ordered)


def ended_early(
    failures: Sequence[Failure], finished: Iterable[tuple[str, str, float]]
) -> tuple[str, str]:
    """The problem and the hint if the first cause is an echo, and workers had ended before with
    status 0; else empty.

    ``finished``: the label and the host of all that did, and when, as `Failure.time`.
    """
    if failures and failures[0].is_echo:
        who = [(label, host) for label, host, then in finished if then < failures[0].time]
        if who:
            return f"{workers_on(who)} had already ended, with status 0", _ENDED_EARLY
    return "", ""


def workers_on(who: Sequence[tuple[str, str]]) -> str:
    """``rank 3 on gpu01``, ``ranks 0-2, 4-7 on gpu[01-02]``, from labels and hosts."""
    labels, hosts = zip(*who, strict=True)
    ranks = [int(label) for label in labels if label.isdecimal()]
    machines = hostlist.fold(hostlist.in_order(hosts))
    named = names.name_ranks(ranks) if len(ranks) == len(labels) else ", ".join(labels)
    return f"{named} on {machines}"


def _kind(failure: Failure) -> int:
    if failure.ended_by in _ASKED_TO_END:
        return 1
    return 2 if failure.is_echo else 0
