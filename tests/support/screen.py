"""A minimal terminal for tests, which shows what a user sees."""

from __future__ import annotations

import re
import unicodedata

_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|[\s\S]")


class Screen:
    """Understands text, CR, LF, cursor up, erase below and colors; wraps and scrolls.

    Anything else raises, so that a test sees every sequence that the code under test uses.
    """

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.columns, self.rows = columns, rows
        self._lines: list[list[str]] = [[]]
        self._row = self._column = 0

    def feed(self, output: str) -> None:
        for match in _TOKEN.finditer(output):
            text, argument, command = match[0], match[1], match[2]
            if command == "A":
                top = max(0, len(self._lines) - self.rows)
                self._row = max(top, self._row - int(argument or 1))
            elif command == "J":
                del self._lines[self._row + 1 :]
                del self._lines[self._row][self._column :]
            elif command == "m":
                continue
            elif text == "\r":
                self._column = 0
            elif text == "\n":
                self._down()
            elif text >= " " and text != "\x7f":
                self._print(text)
            else:
                raise AssertionError(f"unexpected control sequence {text!r}")

    def lines(self) -> list[str]:
        """All lines, including scrolled ones, without trailing blanks."""
        return ["".join(line).rstrip() for line in self._lines]

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._lines):
            self._lines.append([])

    def _print(self, character: str) -> None:
        wide = unicodedata.east_asian_width(character) in "WF"
        if self._column + 1 + wide > self.columns:
            self._column = 0
            self._down()
        line = self._lines[self._row]
        line.extend(" " * (self._column - len(line)))
        line[self._column : self._column + 1 + wide] = [character] + [""] * wide
        self._column += 1 + wide
