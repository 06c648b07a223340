"""The contract of every engine: what starts a launch plan and reports its state.

SSH, Slurm and Kubernetes are engines. Commands, views, records and logs do not know which one
runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dtrain.failures.cause import Report
from dtrain.runs.folder import RunFolder
from dtrain.runs.record import Record
from dtrain.runs.status import HostStatus


class Engine(Protocol):
    """Serves one run. What happens goes to the run's journal, log store and observer.

    A `Control` stops the job (its first request is gentle, its second one kills), or leaves it
    running.
    """

    def run(self, secret_values: Mapping[str, str]) -> Report:
        """Start the job of the engine's request, and follow it until it is over and nothing of it
        is left. The observer has received the report when this returns.

        Raises StorageError if this machine cannot store the run's files; nothing has been started
        then.
        """

    def attach(self, record: Record, folder: RunFolder, secrets: Mapping[str, str]) -> Report:
        """Follow a run that no other process is in charge of, until it ends or is left.
        ``secrets`` are needed only to start the job again."""

    def clean(self, record: Record, folder: RunFolder) -> bool:
        """End what a finished run has left. Returns whether nothing is left; if something may be, a
        notice says what."""

    def status(self, record: Record, known: Mapping[str, HostStatus]) -> Mapping[str, HostStatus]:
        """The state of each host of the current attempt, from the engine. ``known`` has the last
        known states."""
