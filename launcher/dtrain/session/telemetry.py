"""Stores and shows the telemetry of one host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dtrain.messages.decode import ProtocolError
from dtrain.messages.telemetry import Sample
from dtrain.runs.events import Sampled
from dtrain.runs.folder import RunFolder
from dtrain.runs.telemetry import TelemetryWriter, round_up
from dtrain.session.observer import Observer


class HostTelemetry:
    """Ignores malformed samples: they come from files that workers can write."""

    def __init__(
        self,
        host: str,
        folder: RunFolder,
        observer: Observer,
        stored: Callable[[int], None],
        seen: Callable[[Sample], None],
        *,
        hosts: int,
    ) -> None:
        """``stored`` gets the time up to which averages are stored, ``seen`` each sample. ``hosts``
        is the number of hosts of the run."""
        self._host = host
        self._writer = TelemetryWriter(folder.path, host, hosts)
        self._observer = observer
        self._stored, self._seen = stored, seen

    def show(self, said: Any) -> None:
        """Show a sample of the last second, and store it for `dtrain top`."""
        with suppress(ProtocolError):
            sample = Sample.read(said)
            self._writer.show(sample)
            self._seen(sample)
            self._observer.on_event(Sampled(self._host, sample))

    def keep(self, said: Any) -> None:
        """Store averages of 10 s."""
        with suppress(ProtocolError):
            average = Sample.read(said)
            if self._writer.append(average):
                self._stored(round_up(average))
