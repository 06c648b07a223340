"""Journals how much output has arrived: the output itself has no times."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from dtrain.runs.events import Sizes
from dtrain.session.recorder import Recorder

SECONDS = 10.0
"""Seconds between two events of an attempt."""


class OutputSizes:
    """Those of one run, or of one attempt."""

    def __init__(self, recorder: Recorder, sizes: Callable[[], Mapping[str, int]]) -> None:
        """``sizes``: bytes of each stream, by its path in the run's folder."""
        self._recorder = recorder
        self._sizes = sizes
        self._journaled: dict[str, int] = {}
        self._due = 0.0

    def journal(self, *, at_once: bool = False) -> None:
        """Journal the streams that have grown since the last event, if it was `SECONDS` ago."""
        if time.monotonic() < self._due and not at_once:
            return
        self._due = time.monotonic() + SECONDS
        sizes = self._sizes()
        grown = {name: size for name, size in sizes.items() if size != self._journaled.get(name)}
        if grown:
            self._journaled |= grown
            self._recorder.record(Sizes(grown))
