"""The process that a session works for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

from dtrain.records import dataclass
from dtrain.session.reporting.observer import Observer
from dtrain.session.stopping.control import Control
from dtrain.transport.questions import Ask


@dataclass(frozen=True, slots=True)
class Caller:
    observer: Observer = field(default_factory=Observer)
    """Gets everything that happens."""
    control: Control = field(default_factory=Control)
    """Stops the job, or leaves it."""
    ask: Ask | None = None
    """Asks a person for passphrases. None: no question is asked."""
    on_running: Callable[[str], None] = lambda run: None
    """Gets the run's name once the job no longer needs this process to start: all workers run, or a
    queue has the job."""
