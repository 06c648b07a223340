"""A run without its workers' output and progress: only dtrain's own notices and the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtrain.runs.events import ProgressReported, RunEvent
from dtrain_cli.views.plain import Plain

if TYPE_CHECKING:
    from dtrain.runs.log_store import Stream


class Quiet(Plain):
    def lines(self, stream: Stream, text: str, partial: str, second: int | None) -> None:
        """The log files have them."""

    def on_event(self, event: RunEvent) -> None:
        if not isinstance(event, ProgressReported):
            super().on_event(event)
