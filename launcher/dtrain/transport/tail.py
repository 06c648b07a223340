"""The end of a stream, kept in bounded memory."""

from __future__ import annotations

import threading

TAIL_SIZE = 1 << 16


class Tail:
    """Keeps the last ``TAIL_SIZE`` bytes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        with self._lock:
            self._bytes += data
            # Trimming only at twice the size keeps the cost per byte constant.
            if len(self._bytes) > 2 * TAIL_SIZE:
                del self._bytes[:-TAIL_SIZE]

    def contents(self) -> bytes:
        with self._lock:
            return bytes(self._bytes[-TAIL_SIZE:])
