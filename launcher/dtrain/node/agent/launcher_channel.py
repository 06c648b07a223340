"""The relay's frames to its launcher."""

from __future__ import annotations

import os
import threading

from dtrain.node.agent.wire import DATA, encode, frame, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from dtrain.node.agent.wire import Json


class LauncherChannel:
    """Writes to stdout, from any thread. Ends the relay when its reader has closed; the job
    continues."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def report(self, kind: str, **body: Any) -> None:
        self.send({"type": kind, **body})

    def send(self, message: Json) -> None:
        self.write(*frame(encode(message)))

    def send_data(self, stream: int, offset: int, data: bytes) -> None:
        self.write(*frame(data, DATA, stream, offset))

    def write(self, *parts: bytes) -> None:
        try:
            with self._lock:
                write_all(1, *parts)
        except OSError:
            os._exit(0)
