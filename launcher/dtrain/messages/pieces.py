"""What a program on a host writes, which arrives in pieces of any size."""

from __future__ import annotations

from dtrain.messages.decode import ProtocolError

MAX_NOISE = 1 << 20
"""Bytes that a login shell may print before the program's own output."""
KEPT = 1 << 16
"""Bytes of that output to keep, to explain why a program did not start."""


class Pieces:
    """Joins pieces up to a mark. Time is linear, and memory stays within the caller's limits."""

    def __init__(self) -> None:
        self._unread = bytearray()
        self._searched = 0

    def add(self, piece: bytes) -> None:
        self._unread += piece

    @property
    def end(self) -> bytes:
        """The last of the bytes that no method has returned."""
        return bytes(self._unread[-KEPT:])

    def rest(self) -> bytes:
        """All bytes that no method has returned."""
        rest = bytes(self._unread)
        self._unread.clear()
        return rest

    def preamble(self, mark: bytes) -> bytes | None:
        """As `until`, for the start of a program's own output."""
        try:
            return self.until(mark, MAX_NOISE)
        except ProtocolError:
            raise ProtocolError(
                f"it printed {MAX_NOISE >> 20} MiB, but not the preamble of dtrain's program"
            ) from None

    def until(self, mark: bytes, limit: int) -> bytes | None:
        """The bytes before ``mark``; None if it has not come. Skips ``mark``.

        Raises ProtocolError after more than ``limit`` bytes.
        """
        at = self._unread.find(mark, self._searched)
        if (len(self._unread) if at < 0 else at) > limit:
            raise ProtocolError(f"more than {limit} bytes without an end")
        if at < 0:
            # The mark may be cut in two.
            self._searched = max(0, len(self._unread) - len(mark) + 1)
            return None
        found = bytes(self._unread[:at])
        del self._unread[: at + len(mark)]
        self._searched = 0
        return found
