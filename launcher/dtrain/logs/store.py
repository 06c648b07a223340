"""The run's folder on the launching machine: every worker's output, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Stream:
    """One output file of one process; its bytes are in ``path`` on this machine."""

    host: str
    role: str
    index: int
    rank: int | None
    fd: Literal["stdout", "stderr"]
    path: Path

    @property
    def label(self) -> str:
        return str(self.rank) if self.rank is not None else f"{self.role}{self.index}"
