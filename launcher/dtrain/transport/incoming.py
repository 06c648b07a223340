"""Reads the stdout of a program on a host, with limits."""

from __future__ import annotations

from dtrain.messages.pieces import Pieces
from dtrain.transport.contract import RemoteProcess


class Incoming:
    """Reads a program's stdout piece by piece. Not thread-safe."""

    def __init__(self, process: RemoteProcess) -> None:
        self._process = process
        self.pieces = Pieces()

    def preamble(self, mark: bytes) -> None:
        """Skip everything up to ``mark``. Raises what `until` raises."""
        while self.pieces.preamble(mark) is None:
            self._more()

    def until(self, mark: bytes, limit: int) -> bytes:
        """The bytes before ``mark``. Skips ``mark``.

        Raises EOFError if the program ends before ``mark``, ProtocolError after more than
        ``limit`` bytes, and ConnectError if the connection is lost.
        """
        while (found := self.pieces.until(mark, limit)) is None:
            self._more()
        return found

    def _more(self) -> None:
        data = self._process.read()
        if not data:
            raise EOFError
        self.pieces.add(data)
