"""What a program on a host writes to its stdout, read with limits."""

from __future__ import annotations

from dtrain.messages.decode import ProtocolError
from dtrain.transport.contract import RemoteProcess

MAX_NOISE = 1 << 20
"""Bytes that a login shell may print before the program's first word."""
KEPT = 1 << 16
"""Bytes of them that are kept, to explain why a program did not start."""


class Incoming:
    """Reads a program's stdout piece by piece. Used by one thread at a time.

    Reading takes linear time and memory within the limits that the caller gives.
    """

    def __init__(self, process: RemoteProcess) -> None:
        self._process = process
        self._unread = bytearray()

    @property
    def rest(self) -> bytes:
        """The end of what has come and was not returned."""
        return bytes(self._unread[-KEPT:])

    def preamble(self, mark: bytes) -> None:
        """Skip everything up to ``mark``. Raises what `until` raises."""
        try:
            self.until(mark, MAX_NOISE)
        except ProtocolError:
            raise ProtocolError(
                f"it printed {MAX_NOISE >> 20} MiB, but not what dtrain's program prints first"
            ) from None

    def until(self, mark: bytes, limit: int) -> bytes:
        """The bytes before ``mark``, which is skipped.

        Raises EOFError when the program ends before that, ProtocolError when there are more than
        ``limit`` bytes, and ConnectError when the connection breaks.
        """
        searched = 0
        while (at := self._unread.find(mark, searched)) < 0:
            if len(self._unread) > limit:
                raise ProtocolError(f"more than {limit} bytes without an end")
            # The mark may be cut in two.
            searched = max(0, len(self._unread) - len(mark) + 1)
            self._more()
        if at > limit:
            raise ProtocolError(f"more than {limit} bytes without an end")
        found = bytes(self._unread[:at])
        del self._unread[: at + len(mark)]
        return found

    def exactly(self, size: int) -> bytes:
        """The next ``size`` bytes. Raises EOFError and ConnectError as `until` does."""
        while len(self._unread) < size:
            self._more()
        found = bytes(self._unread[:size])
        del self._unread[:size]
        return found

    def _more(self) -> None:
        data = self._process.read()
        if not data:
            raise EOFError
        self._unread += data
