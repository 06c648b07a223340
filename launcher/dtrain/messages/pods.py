"""Messages of `dtrain.node.pods.watcher`, the watcher of a pod. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dtrain.messages.agent import Bye, Event, Notice, ProgressReport, Telemetry, read_event
from dtrain.messages.decode import decode_named
from dtrain.records import dataclass


@dataclass(frozen=True, slots=True)
class WorkersWrote:
    """The workers have written output, which comes with the log of the pod."""


@dataclass(frozen=True, slots=True)
class WatcherAlive:
    """The answer to ``ping``."""


PodMessage = WorkersWrote | ProgressReport | Telemetry | Notice | Event | WatcherAlive | Bye
"""An event is evidence about the workers."""

_MESSAGES: dict[str, Callable[..., PodMessage]] = {
    "wrote": WorkersWrote,
    "progress": ProgressReport,
    "sample": Telemetry,
    "average": Telemetry,
    "notice": Notice,
    "alive": WatcherAlive,
    "bye": Bye,
}


def read_message(body: Mapping[str, Any]) -> PodMessage:
    """Raises ProtocolError."""
    if body.get("type") == "event":
        return read_event(body.get("event"))
    return decode_named(_MESSAGES, body, "message")
