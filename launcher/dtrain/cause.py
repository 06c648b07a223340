"""What ended a run, told from what every host reported. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dtrain.diagnostics import ExitCode


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

    @property
    def label(self) -> str:
        return str(self.rank) if self.rank is not None else f"{self.role}{self.index}"


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
