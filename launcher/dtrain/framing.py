"""Turns a worker's bytes into lines that are safe to display. Pure; memory is bounded.

A worker can write anything: progress bars with carriage returns, bytes that are not UTF-8, lines
of a megabyte, escape sequences that change the window title. `LineFramer` turns the bytes into
lines, and `clean` makes a line harmless. The log file keeps the original bytes.

Functions pass many lines as one text, in which each line has its newline: a list of lines would
take three times as long.
"""

from __future__ import annotations

import codecs
import re

LIMIT = 16 << 10
"""Bytes to display of one line, and to buffer of an unfinished line."""


class LineFramer:
    """Turns one stream's bytes, in pieces of any size, into the lines a terminal would show.

    ``whole_in`` names the file that has the whole of a line longer than ``limit`` bytes. The
    result does not depend on how the bytes are cut into pieces.
    """

    def __init__(self, *, limit: int = LIMIT, whole_in: str = "") -> None:
        self._limit = limit
        self._whole_in = whole_in
        # A line is drawn by segments that carriage returns separate. ``_shown`` is what the
        # finished segments left; ``_head`` and ``_size`` describe the segment still being written.
        # It is a list, so that a segment costs its own length and not that of the whole line.
        self._shown: list[str] = []
        self._escaped = False  # whether `_shown` holds an escape sequence
        self._head = bytearray()
        self._size = 0

    @property
    def partial(self) -> str:
        """What a terminal shows of the line that has not ended yet: a progress bar, usually."""
        if not self._size:
            return "".join(self._shown)
        segment = self._segment()
        if self._redraws(segment) or len(segment) >= len(self._shown):
            return segment
        return segment + "".join(self._shown[len(segment) :])

    def feed(self, data: bytes) -> str:
        """The lines that ``data`` completes."""
        if b"\0" in data:  # a terminal ignores it
            data = data.replace(b"\0", b"")
        last = data.rfind(b"\n") + 1
        if not last:
            self._extend(data)
            return ""
        text, first = "", 0
        if self._size or self._shown:  # a line has begun
            first = data.find(b"\n") + 1
            self._extend(data[: first - 1])
            text = self._take()
        if last > first:
            text += self._bulk(data[first:last])
        if last < len(data):
            self._extend(data[last:])
        return text

    def flush(self) -> str:
        """The last line, if the stream ended without a newline."""
        return self._take() if self._size or self._shown else ""

    def _bulk(self, body: bytes) -> str:
        """Whole lines; only those with a carriage return, or very long ones, cost extra."""
        if b"\r" not in body and _are_short(body, self._limit):
            return body.decode("utf-8", "backslashreplace")
        return "".join(map(self._line, body[:-1].split(b"\n")))

    def _line(self, line: bytes) -> str:
        if b"\r" not in line and len(line) <= self._limit:
            return line.decode("utf-8", "backslashreplace") + "\n"
        self._extend(line)
        return self._take()

    def _extend(self, data: bytes) -> None:
        if b"\r" in data:
            *finished, data = data.split(b"\r")
            for segment in finished:
                self._append(segment)
                self._draw()
        self._append(data)

    def _draw(self) -> None:
        """Write the segment over what the line shows."""
        if segment := self._segment():
            if self._redraws(segment):
                self._shown = list(segment)
            else:
                self._shown[: len(segment)] = segment
            self._escaped = "\x1b" in segment
        self._head.clear()
        self._size = 0

    def _redraws(self, segment: str) -> bool:
        """Whether ``segment`` replaces the whole line: where there are escape sequences, columns
        are not characters."""
        return self._escaped or "\x1b" in segment

    def _append(self, data: bytes) -> None:
        if len(self._head) < self._limit:
            self._head += data[: self._limit - len(self._head)]
        self._size += len(data)

    def _take(self) -> str:
        line = self.partial
        self._shown.clear()
        self._escaped = False
        self._head.clear()
        self._size = 0
        return line + "\n"

    def _segment(self) -> str:
        """The segment still being written, as far as it is kept."""
        if self._size <= self._limit:
            return self._head.decode("utf-8", "backslashreplace")
        # Not final: a character that the cut goes through is left out.
        text = codecs.getincrementaldecoder("utf-8")("backslashreplace").decode(self._head)
        where = f", whole in {self._whole_in}" if self._whole_in else ""
        return f"{text}… ({self._size:,} bytes{where})"


def _are_short(lines: bytes, limit: int) -> bool:
    """Whether each line has at most ``limit`` bytes."""
    at = 0
    while len(lines) - at > limit:
        at = lines.rfind(b"\n", at, at + limit + 1) + 1
        if not at:
            return False
    return True


def split(text: str) -> list[str]:
    """The lines of ``text``, without their newlines. The last line must have one, too."""
    return text.split("\n")[:-1]


def prefixed(text: str, head: str) -> str:
    """``text`` with ``head`` before each line."""
    if text.find("\n") == len(text) - 1:  # one line
        return head + text
    # `bytes.replace` takes a third of the time of `str.replace`.
    body = text[:-1].encode().replace(b"\n", b"\n" + head.encode()).decode()
    return f"{head}{body}\n"


_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_SGR = re.compile(r"\x1b\[[0-9;:]{0,64}m")
_CONTROL = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b[ -/]*[0-~]?"
    r"|(?P<newline>[\n\r\u2028\u2029]+)"
    r"|(?P<surrogate>[\ud800-\udfff])"
    rf"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f{_BIDI}]"
)
_UNSAFE = re.compile(
    rf"(?P<sgr>{_SGR.pattern})"
    # Strings: OSC (titles, links, clipboard), DCS, SOS, PM, APC. The end is optional, so that the
    # search never has to look for it again from a later introducer.
    r"|(?P<string>\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])"
    r"(?P<body>[^\x07\x18\x1a\x1b\x9c]*)(?P<end>\x07|\x1b\\|\x9c)?"
    rf"|{_CONTROL.pattern}"
)
_RESET = "\x1b[0m"


def clean(text: str, color: bool = False) -> str:
    """``text`` as one line that does nothing to a terminal but print.

    Tabs stay; line breaks become spaces; colors stay where ``color`` allows them, and end with
    the line. All other control characters and sequences, and those that reorder text, are removed.
    """
    if text.isprintable():
        return text
    bare = _SGR.sub("", text)
    if bare.replace("\t", " ").isprintable():  # Colors and tabs are all that most lines have.
        return text + _RESET if color and len(bare) < len(text) else bare
    colored = False

    def replace(match: re.Match[str]) -> str:
        nonlocal colored
        if color and match["sgr"]:
            colored = True
            return match["sgr"]
        if match["string"] and match["end"] is None:
            # It loses its introducer only, so that it hides nothing. No string in it has an end.
            return _CONTROL.sub(_harmless, match["body"])
        return _harmless(match)

    cleaned = _UNSAFE.sub(replace, text)
    return cleaned + _RESET if colored else cleaned


def _harmless(match: re.Match[str]) -> str:
    """The replacement for a control character or sequence."""
    if match["newline"]:
        return " "
    return "\ufffd" if match["surrogate"] else ""


def clean_all(text: str, color: bool = False) -> str:
    """`clean` for each line of ``text``. Fast for lines without control characters."""
    if _is_clean(text):
        return text
    return "".join(
        f"{line if line.isprintable() else clean(line, color)}\n" for line in split(text)
    )


_LONG = 1000
"""Characters."""
_ASCII_CONTROLS = [chr(code) for code in (*range(0x20), 0x7F) if code != ord("\n")]


def _is_clean(text: str) -> bool:
    """Whether all lines are printable. `str.isprintable` takes eight times as long for much ASCII,
    and less time for a line."""
    if len(text) > _LONG and text.isascii():
        return not any(map(text.__contains__, _ASCII_CONTROLS))
    return text.replace("\n", "").isprintable()
