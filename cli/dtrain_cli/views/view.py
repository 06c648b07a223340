"""A view of a run: a feed that prints."""

from __future__ import annotations

from collections.abc import Callable

from dtrain.runs.events import RunEvent, RunLeft
from dtrain.session.reporting.feed import Feed, RunReceiver
from dtrain_cli.standard import reader_gone
from dtrain_cli.views import Filters


class View(Feed):
    """Prints a run while it runs, in a separate thread."""

    def __init__(
        self,
        display: Callable[[Callable[[OSError], None]], RunReceiver],
        filters: Filters,
        on_broken_pipe: Callable[[], None],
        *,
        by_arrival: bool = False,
    ) -> None:
        """Call ``display`` with a handler for failures of stdout and stderr. ``on_broken_pipe``
        is called once, from the printing thread, when the reader of either is gone."""
        self._on_broken_pipe = on_broken_pipe
        self._broken = False
        self.output_error: OSError | None = None
        """The error of the first failed write to stdout or stderr."""
        super().__init__(display(self._output_failed), filters.show, by_arrival=by_arrival)

    def on_event(self, event: RunEvent) -> None:
        if isinstance(event, RunLeft):
            run = event.run
            if event.still_running is None:
                how = f"the job may keep running: `dtrain attach {run}` follows it again"
            elif event.still_running:
                how = f"the job keeps running: `dtrain attach {run}` shows it"
            else:
                how = f"the job is not running now: `dtrain attach {run}` restarts it"
            self.notice(f"left the run; {how}, `dtrain stop {run}` stops it")
        super().on_event(event)

    def _output_failed(self, error: OSError) -> None:
        self.output_error = self.output_error or error
        if not reader_gone(error):
            self.notice(f"output is no longer shown: {error.strerror}")
        elif not self._broken:
            self._broken = True
            self._on_broken_pipe()
