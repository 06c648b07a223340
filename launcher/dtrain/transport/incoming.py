"""Reads the stdout of a program on a host, with limits."""

from __future__ import annotations

from dtrain.messages.decode import ProtocolError
from dtrain.transport.contract import RemoteProcess

MAX_NOISE = 1 << 20
"""Bytes that a login shell may print before the program's own output."""
KEPT = 1 << 16
"""Bytes of that output to keep, to explain why a program did not start."""


class Incoming:
    """Reads a program's stdout piece by piece. Not thread-safe.

    Time is linear, and memory stays within the caller's limits.
    """

    def __init__(self, process: RemoteProcess) -> None:
        self._process = process
        self._unread = bytearray()

    @property
    def rest(self) -> bytes:
        """The end of the received bytes that no method has returned."""
        return bytes(self._unread[-KEPT:])

    def preamble(self, mark: bytes) -> None:
        """Skip everything up to ``mark``. Raises what `until` raises."""
        try:
            self.until(mark, MAX_NOISE)
        except ProtocolError:
            raise ProtocolError(
                f"it printed {MAX_NOISE >> 20} MiB, but not the preamble of dtrain's program"
            ) from None

    def until(self, mark: bytes, limit: int) -> bytes:
        """The bytes before ``mark``. Skips ``mark``.

        Raises EOFError if the program ends before ``mark``, ProtocolError after more than
        ``limit`` bytes, and ConnectError if the connection is lost.
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

    def _more(self) -> None:
        data = self._process.read()
        if not data:
            raise EOFError
        self._unread += data
