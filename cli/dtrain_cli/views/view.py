"""A feed that is printed: a view of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtrain.session.feed import Feed, Receiver
from dtrain_cli.views.outlet import reader_gone

if TYPE_CHECKING:
    from dtrain.runs.log_store import Stream


@dataclass(frozen=True, slots=True)
class Filters:
    """Which workers' output is shown; None shows all. Files always have everything."""

    ranks: frozenset[int] | None = None
    hosts: frozenset[str] | None = None

    def show(self, stream: Stream) -> bool:
        return (self.hosts is None or stream.host in self.hosts) and (
            self.ranks is None or stream.rank in self.ranks
        )


class View(Feed):
    """Prints a run as it goes on, in a thread of its own."""

    def __init__(
        self,
        display: Callable[[Callable[[OSError], None]], Receiver],
        filters: Filters,
        on_broken_pipe: Callable[[], None],
    ) -> None:
        """``display`` is called with what to do when stdout or stderr fails. ``on_broken_pipe``
        is called once, from the printing thread, when the reader of either is gone."""
        self._on_broken_pipe = on_broken_pipe
        self._broken = False
        self.output_error: OSError | None = None
        """Why stdout or stderr can no longer be written, where its reader is not gone."""
        super().__init__(display(self._output_failed), filters.show)

    def left(self, run: str, *, still_running: bool = True) -> None:
        if still_running:
            how = f"the job goes on: `dtrain attach {run}` takes it up"
        else:
            how = f"nothing of it runs now: `dtrain attach {run}` starts it again"
        self.notice(f"left; {how}, `dtrain stop {run}` ends it")
        super().left(run, still_running=still_running)

    def _output_failed(self, error: OSError) -> None:
        if not reader_gone(error):
            self.output_error = error
            self.notice(f"output is no longer shown: {error.strerror}")
        elif not self._broken:
            self._broken = True
            self._on_broken_pipe()
