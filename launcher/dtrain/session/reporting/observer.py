"""Receives what happens in a run. The CLI's views are observers."""

from __future__ import annotations

from dtrain.runs.events import NoticeShown, RunEvent
from dtrain.runs.log_store import Stream


class Observer:
    """Ignores everything; subclasses do not. Calls may come from any thread and must return at
    once: a slow terminal never slows a run, because views read output back from the stream files.
    """

    def on_event(self, event: RunEvent) -> None:
        """After `Finished` or `RunLeft`, nothing follows."""

    def output(self, stream: Stream, size: int) -> None:
        """``stream.path`` now holds ``size`` bytes."""

    def skip(self, stream: Stream, size: int) -> None:
        """Do not show the first ``size`` bytes of ``stream.path``: they are old."""

    def notice(self, text: str) -> None:
        """A message for the user that the journal does not keep."""
        self.on_event(NoticeShown(text))


class Both(Observer):
    """Passes everything to two observers."""

    def __init__(self, first: Observer, second: Observer) -> None:
        self._observers = (first, second)

    def on_event(self, event: RunEvent) -> None:
        for one in self._observers:
            one.on_event(event)

    def output(self, stream: Stream, size: int) -> None:
        for one in self._observers:
            one.output(stream, size)

    def skip(self, stream: Stream, size: int) -> None:
        for one in self._observers:
            one.skip(stream, size)
