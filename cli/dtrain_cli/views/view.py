"""A view of a run: a feed that prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dtrain.records import dataclass
from dtrain.session.feed import Feed, RunReceiver
from dtrain_cli.views.outlet import reader_gone

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


class View(Feed):
    """Prints a run while it runs, in a separate thread."""

    def __init__(
        self,
        display: Callable[[Callable[[OSError], None]], RunReceiver],
        filters: Filters,
        on_broken_pipe: Callable[[], None],
    ) -> None:
        """Call ``display`` with a handler for failures of stdout and stderr. ``on_broken_pipe``
        is called once, from the printing thread, when the reader of either is gone."""
        self._on_broken_pipe = on_broken_pipe
        self._broken = False
        self.output_error: OSError | None = None
        """The error of a failed write to stdout or stderr, except that its reader is gone."""
        super().__init__(display(self._output_failed), filters.show)

    def left(self, run: str, *, still_running: bool = True) -> None:
        if still_running:
            how = f"the job keeps running: `dtrain attach {run}` shows it"
        else:
            how = f"the job is not running now: `dtrain attach {run}` restarts it"
        self.notice(f"left the run; {how}, `dtrain stop {run}` stops it")
        super().left(run, still_running=still_running)

    def _output_failed(self, error: OSError) -> None:
        if not reader_gone(error):
            self.output_error = error
            self.notice(f"output is no longer shown: {error.strerror}")
        elif not self._broken:
            self._broken = True
            self._on_broken_pipe()
