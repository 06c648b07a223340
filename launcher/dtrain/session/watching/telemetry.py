"""Stores and shows the telemetry of one host."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from dtrain.messages.agent import Telemetry
from dtrain.messages.decode import ProtocolError
from dtrain.messages.telemetry import Sample
from dtrain.runs.events import Sampled
from dtrain.runs.telemetry import TelemetryWriter, round_up
from dtrain.session.watching.watched import WatchedJob


class HostTelemetry:
    """Ignores malformed samples: they come from files that workers can write."""

    def __init__(
        self,
        host: str,
        job: WatchedJob,
        gpus: Collection[int] = (),
        stored: Callable[[int], None] = lambda until: None,
    ) -> None:
        """``gpus``: those that the job uses on the host; empty means all. ``stored`` gets the time
        up to which averages are stored."""
        self._host = host
        self._gpus = gpus
        self._writer = TelemetryWriter(job.folder.path, host, len(job.plan.hosts))
        self._observer, self._steps = job.recorder.observer, job.steps
        self._stored = stored

    def take(self, message: Telemetry) -> None:
        """Store averages. Show a sample of the last second, and store it for `dtrain top`."""
        try:
            sample = Sample.read(message.said)
        except ProtocolError:
            return
        if message.type == "sample":
            self._writer.show(sample)
            self._steps.sample(self._host, sample, self._gpus, time.monotonic())
            self._observer.on_event(Sampled(self._host, sample))
        elif self._writer.append(sample):
            self._stored(round_up(sample))
