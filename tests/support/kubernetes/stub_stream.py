"""A stream of the API server whose lines a test gives."""

from __future__ import annotations

from collections.abc import Generator

from dtrain.engines.kubernetes.routines import InThread, Routine


class StubStream:
    """See `dtrain.engines.kubernetes.line_stream.LineStream`."""

    def __init__(self, pieces: Generator[list[bytes]]) -> None:
        """``pieces`` may block. What it raises before the first one, the server answers instead of
        a stream."""
        self._pieces = pieces
        self._first = [next(pieces, [])]

    def read(self) -> Routine[list[bytes]]:
        if self._first:
            return self._first.pop()
        lines: list[bytes] = yield InThread(lambda: next(self._pieces, []))
        return lines

    def close(self) -> None: ...
