"""Which workers a view shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtrain.records import dataclass

if TYPE_CHECKING:
    from dtrain.runs.log_store import Stream


@dataclass(frozen=True, slots=True)
class Filters:
    """The workers whose output is shown; None shows all. Log files always have all output."""

    ranks: frozenset[int] | None = None
    hosts: frozenset[str] | None = None

    def show(self, stream: Stream) -> bool:
        return (self.hosts is None or stream.host in self.hosts) and (
            self.ranks is None or stream.rank in self.ranks
        )
