"""What ended a run, told from what every host reported. Pure.

When one worker of a distributed job fails, the others fail too within milliseconds, and each
blames its peer. The first cause is the earliest failure that is not such an echo.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dtrain import hostlist
from dtrain.diagnostics import DtrainError, ExitCode, NodeError
from dtrain.failures.catalogue import End, Explanation, explain
from dtrain.failures.kernel import KernelMessage
from dtrain.spec.model import Host

_SIGNALLED = 128
"""A shell's exit status for a signal is this and its number."""

# A worker that a launcher or an operator ended has not failed of itself.
_ASKED_TO_END = {"SIGTERM", "SIGINT", "SIGHUP"}


@dataclass(frozen=True, slots=True)
class Failure:
    """One process that ended badly."""

    host: str
    role: str
    index: int
    rank: int | None
    time: float
    """Seconds since the epoch by the launching machine's clock (offsets corrected)."""
    code: int | None = None
    """Exit status; None when a signal ended it."""
    signal: str | None = None
    """Name such as ``SIGKILL``."""
    message: str = ""
    """Last line of what it said: ``ValueError: bad batch``, say."""
    traceback: str = ""
    """What it wrote about its end, as it wrote it (may hold control characters)."""
    pid: int | None = None
    out_of_memory: bool = False
    """Whether the kernel killed it for want of memory."""
    kernel: KernelMessage | None = None
    """What the host's kernel said about it."""

    @property
    def label(self) -> str:
        """Short name: the rank, or role and index."""
        return str(self.rank) if self.rank is not None else f"{self.role}{self.index}"

    @property
    def who(self) -> str:
        """``rank 3 on gpu01``, ``ps1 on gpu02``."""
        return f"{f'rank {self.rank}' if self.rank is not None else self.label} on {self.host}"

    @property
    def how(self) -> str:
        """``exited with status 1``, ``was killed by SIGKILL``."""
        if self.kernel is not None and self.kernel.out_of_memory:
            return "was killed by the kernel's out-of-memory killer"
        if self.ended_by == "SIGKILL" and self.out_of_memory:
            return "was killed: the host ran out of memory"
        if self.signal is not None:
            return f"was killed by {self.signal}"
        if self.code is not None:
            return f"exited with status {self.code}"
        return "failed"

    @property
    def ended_by(self) -> str | None:
        """The signal that ended it, also where a shell or container tells it by a status."""
        if self.signal is None and self.code is not None and self.code > _SIGNALLED:
            with contextlib.suppress(ValueError):
                return signal.Signals(self.code - _SIGNALLED).name
        return self.signal

    @property
    def crashed(self) -> bool:
        """Whether a signal ended it that nobody sends to ask for an end."""
        return self.ended_by is not None and self.ended_by not in _ASKED_TO_END

    @property
    def words(self) -> str:
        """All that it said about its end."""
        return f"{self.message}\n{self.traceback}".strip()

    @property
    def explanation(self) -> Explanation | None:
        """What is known of this way to fail."""
        known = explain(
            End(self.code, self.ended_by, self.out_of_memory, self.message, self.traceback)
        )
        told = self.kernel
        if told is None or (told.weak and known is not None and not known.echo):
            return known
        return Explanation(told.id, told.what, told.remedy, echo=False, host=told.host)

    @property
    def is_echo(self) -> bool:
        """Whether another process's failure is behind it."""
        return self.explanation is not None and self.explanation.echo

    @property
    def host_at_fault(self) -> bool:
        """Whether the host is to blame, so that another one would do better."""
        return self.explanation is not None and self.explanation.host

    @property
    def hint(self) -> str:
        """What happened and what to do about it, a line each, where that is known; else empty."""
        known = self.explanation
        return f"{known.what}\n{known.remedy}" if known is not None else ""


@dataclass(frozen=True, slots=True)
class Report:
    """How a run ended. ``failures`` has the first cause first."""

    exit_code: ExitCode
    reason: str
    """One sentence: ``all 4 workers finished``, ``rank 3 on gpu01 exited with status 1``."""
    failures: tuple[Failure, ...] = ()
    problems: tuple[str, ...] = ()
    """Hosts that failed, were lost, or could not be cleaned: one message each."""
    hint: str = ""
    seconds: float = 0.0
    logs: str = ""
    """The run's folder on this machine."""

    @property
    def ok(self) -> bool:
        """Whether the job has done its work."""
        return self.exit_code is ExitCode.OK

    @property
    def run(self) -> str:
        """The run's name; empty if it never began."""
        return self.logs.rpartition("/")[2]


CLOSE = 0.05
"""Seconds within which the clocks of two hosts cannot tell who failed first."""


def in_order_of_blame(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """The first cause first: by kind (own fault, told to end, echo of a peer), then by time.

    Of those that failed on several hosts at what may be the same moment, one that a signal ended
    comes first, because others notice that within milliseconds, and one that said something comes
    before one that is silent.
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
        # One host's clock is right about what happened on that host.
        and (failure is earliest or failure.host != earliest.host)
    ]
    first = min(at_once, key=lambda failure: (not failure.crashed, not failure.words))
    ordered.remove(first)
    return (first, *ordered)


def alike(problems: Sequence[DtrainError], hosts: Sequence[Host]) -> list[tuple[str, str]]:
    """Message and hint of each kind of problem, those of several hosts together.

    Two problems are alike when they differ in nothing but their host's name and address. What is
    said is the first host's, in the order of ``hosts``, after a list of all of them.
    """
    order = {host.name: place for place, host in enumerate(hosts)}
    kinds: dict[str, list[DtrainError]] = {}
    for problem in sorted(problems, key=lambda p: order.get(getattr(p, "host", ""), len(order))):
        text = f"{problem.message}\0{problem.hint}"
        if isinstance(problem, NodeError) and problem.host in order:
            host = hosts[order[problem.host]]
            for own in sorted({host.name, host.address}, key=len, reverse=True):
                text = re.sub(rf"(?<![\w.-]){re.escape(own)}(?![\w-])", "\0", text)
        kinds.setdefault(text, []).append(problem)
    told = []
    for first, *others in kinds.values():
        message = first.message
        if others and isinstance(first, NodeError):
            names = dict.fromkeys(e.host for e in (first, *others) if isinstance(e, NodeError))
            more = f" (so on {first.host}; the others alike)" if len(names) > 1 else ""
            message = f"{hostlist.fold(names)}{message.removeprefix(first.host)}{more}"
        told.append((message, first.hint))
    return told


def _kind(failure: Failure) -> int:
    if failure.ended_by in _ASKED_TO_END:
        return 1
    return 2 if failure.is_echo else 0
