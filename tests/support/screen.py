"""A terminal for tests, which shows what a user sees."""

from __future__ import annotations

import copy
from typing import Any

import pyte


class Screen(pyte.HistoryScreen):
    """pyte's terminal with an alternate screen, which pyte lacks."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self._main: Any = None
        super().__init__(columns, rows, history=100_000, ratio=1)
        self._stream = pyte.Stream(self)

    def set_mode(self, *modes: int, **options: Any) -> None:
        super().set_mode(*modes, **options)
        if 1049 in modes and self._main is None:
            self._main = copy.deepcopy((self.buffer, self.cursor, list(self.history.top)))
            self.erase_in_display(2)

    def reset_mode(self, *modes: int, **options: Any) -> None:
        super().reset_mode(*modes, **options)
        if 1049 in modes and self._main is not None:
            self.buffer, self.cursor, top = self._main
            self.history.top.clear()
            self.history.top.extend(top)
            self._main = None

    @property
    def alternate(self) -> bool:
        """Whether the alternate screen is shown."""
        return self._main is not None

    def feed(self, output: str) -> None:
        self._stream.feed(output)

    def scrolled(self) -> list[str]:
        """The lines that have left the screen at its top."""
        return [self._text(line) for line in self.history.top]

    def everything(self) -> list[str]:
        """All lines, including scrolled ones, without blanks at their ends."""
        shown = self.scrolled() + [line.rstrip() for line in self.display]
        while len(shown) > 1 and not shown[-1] and not shown[-2]:
            shown.pop()
        return shown

    def _text(self, line: Any) -> str:
        return "".join(line[column].data for column in range(self.columns)).rstrip()
