"""What ended a run, told from what every host reported. Pure.

When one worker of a distributed job fails, the others fail too within milliseconds, and each
blames its peer. The first cause is the earliest failure that is not such an echo.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dtrain import hostlist
from dtrain.diagnostics import DtrainError, ExitCode, NodeError
from dtrain.spec.model import Host


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
        if self.out_of_memory:
            return "was killed: the host ran out of memory"
        if self.signal is not None:
            return f"was killed by {self.signal}"
        if self.code is not None:
            return f"exited with status {self.code}"
        return "failed"

    @property
    def hint(self) -> str:
        """What to do about it, where what it said does not tell; else empty."""
        said = f"{self.message}\n{self.traceback}"
        return next((advice for sign, advice in _ADVICE if sign.search(said)), "")


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


# What a worker says when the fault lies with the peer that it was talking to.
_ECHO = re.compile(
    r"Connection closed by peer"
    r"|Connection reset by peer"
    r"|Connection refused"
    r"|Broken pipe"
    r"|remote process (?:has )?(?:exited|closed)"
    r"|ncclRemoteError|ncclSystemError"
    r"|Socket closed"
    r"|failed to connect to all addresses"
    r"|(?:UnavailableError|AbortedError|CancelledError)\b"
    r"|Coordination service|coordination service"
    r"|Timed out (?:after|waiting)|Wait timeout"
    r"|process group .*(?:aborted|shut down)"
)

# What torch and TensorFlow say at the end and do not explain.
_ADVICE = (
    (
        re.compile(r"terminate called without an active exception"),
        (
            "a thread of gloo outlived torch.distributed.destroy_process_group() and Python ended"
            " under it; `import torch.distributed.nn` before init_process_group() lets the group go"
        ),
    ),
)

# A worker that a launcher or an operator ended has not failed of itself.
_ASKED_TO_END = {"SIGTERM", "SIGINT", "SIGHUP"}


def in_order_of_blame(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """The first cause first: by kind (own fault, told to end, echo of a peer), then by time.

    A signal such as SIGKILL or SIGSEGV is the worker's own fault whatever it last said.
    """
    return tuple(sorted(failures, key=lambda failure: (_kind(failure), failure.time)))


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
    if failure.signal in _ASKED_TO_END:
        return 1
    if failure.signal is not None:
        return 0
    said = f"{failure.message}\n{failure.traceback}"
    return 2 if _ECHO.search(said) else 0
