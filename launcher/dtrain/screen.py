"""A few lines of a terminal for programs that move the cursor up. Pure; memory is bounded.

Nested progress bars redraw several lines: a newline, the inner bar, and "cursor up" back to the
outer bar. As a log, each refresh would be one more line. `ScreenFramer` keeps the lines that may
still change, and completes a line when the cursor has moved too far below it.

A full terminal emulator (pyte) takes 3 s of CPU time per MB of such output. This one understands
vertical movement only, and leaves the rest to `LineFramer`.
"""

from __future__ import annotations

import re

from dtrain.framing import LIMIT, LineFramer, clean

_ROWS = 16
"""Lines that are kept at most."""
_CALM = 8
"""Lines after the last redrawing after which plain lines are not delayed any more."""
_MOVE = re.compile(rb"\x1b\[(\d{0,3})([ABEF])")
_UP = re.compile(rb"\x1b\[\d{0,3}[AF]")
_UNFINISHED = re.compile(rb"\x1b(?:\[\d{0,3})?\Z")


class ScreenFramer:
    """A `LineFramer` that understands a cursor that moves up and down.

    Until the cursor moves up for the first time, lines take the same way as in a `LineFramer`. The
    result does not depend on how the bytes are cut into pieces.
    """

    def __init__(self, *, limit: int = LIMIT, whole_in: str = "") -> None:
        self._limit = limit
        self._whole_in = whole_in
        self._rows = [self._row()]
        self._at = 0
        """The row with the cursor."""
        self._height = 0
        """How far up the program moves; 0 while it writes plain lines."""
        self._since = 0
        """Newlines since the cursor last moved up."""
        self._held = b""

    @property
    def partial(self) -> str:
        """The lines that may still change, in one line."""
        if not self._height:
            return self._rows[0].partial
        return " · ".join(text.strip() for text in self._texts(self._rows))

    def feed(self, data: bytes) -> str:
        """The lines that ``data`` completes."""
        if self._held:
            data = self._held + data
            self._held = b""
        if not self._height and b"\x1b" not in data:
            return self._rows[0].feed(data)
        if b"\x1b" in data[-5:] and (cut := _UNFINISHED.search(data, max(0, len(data) - 5))):
            self._held, data = cut[0], data[: cut.start()]
        if not self._height and not _UP.search(data):
            return self._rows[0].feed(data)
        lines = ""
        at = 0
        for move in _MOVE.finditer(data):
            lines += self._write(data[at : move.start()])
            at = move.start()
            if self._height or move[2] in b"AF":
                self._move(max(1, int(move[1] or 1)), move[2])
                at = move.end()
        return lines + self._write(data[at:])

    def flush(self) -> str:
        """The lines that are left when the stream has ended."""
        if self._held:
            self._rows[self._at].feed(self._held)
            self._held = b""
        if not self._height:
            return self._rows[0].flush()
        lines = _joined(self._texts(self._rows))
        self._rows, self._at, self._height = [self._row()], 0, 0
        return lines

    def _write(self, data: bytes) -> str:
        if not self._height:
            return self._rows[0].feed(data)
        lines = ""
        first, *rest = data.split(b"\n")
        self._rows[self._at].feed(first)
        for number, text in enumerate(rest):
            lines += self._newline()
            if not self._height:  # Nothing is redrawn any more.
                return lines + self._rows[0].feed(b"\n".join(rest[number:]))
            self._rows[self._at].feed(text)
        return lines

    def _newline(self) -> str:
        self._at += 1
        self._since += 1
        if self._at == len(self._rows):
            self._rows.append(self._row())
        self._rows[self._at].feed(b"\r")
        if self._since > self._height + _CALM:
            done, self._rows = self._rows[: self._at], self._rows[self._at :]
            self._height = 0
        else:
            above = max(0, self._at - self._height)
            done, self._rows = self._rows[:above], self._rows[above:]
        self._at -= len(done)
        return _joined(self._texts(done))

    def _move(self, count: int, kind: bytes) -> None:
        if kind in b"AF":
            missing = min(count - self._at, _ROWS - len(self._rows))
            if missing > 0:  # These were completed before the program began to redraw.
                self._rows[:0] = [self._row() for _ in range(missing)]
                self._at += missing
            self._at = max(0, self._at - count)
            self._height = max(self._height, len(self._rows) - 1 - self._at)
            self._since = 0
        else:
            self._at = min(self._at + count, len(self._rows) - 1)
        if kind in b"EF":
            self._rows[self._at].feed(b"\r")

    def _texts(self, rows: list[LineFramer]) -> list[str]:
        """What these rows show, without those that the program has blanked."""
        return [row.partial.rstrip() for row in rows if clean(row.partial).strip()]

    def _row(self) -> LineFramer:
        return LineFramer(limit=self._limit, whole_in=self._whole_in)


def _joined(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
