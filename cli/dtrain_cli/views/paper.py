"""Draw reports with rich, for a terminal or for a pipe with a known width."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.segment import Segment, Segments
from rich.table import Column, Table
from rich.text import Text

_WIDEST = 110
"""Columns; wider text is hard to read."""
_UNLIMITED = 1 << 14
"""Columns of a table in a pipe, which need not fit a screen."""
_ASCII = str.maketrans({"×": "x", "█": "#", "│": "|", "…": "...", "·": "-"})
_UNIT = re.compile(r"(?<=\d) (?=(?:%|s|ms|GB|GiB|x|×)(?:\W|$))")


class Paper:
    """Draws a report. Callers pass texts from files and hosts through `clean` first. rich
    interprets nothing in them: no markup, no emoji codes, no highlighting."""

    def __init__(self, columns: int, *, color: bool, unicode: bool, terminal: bool = False) -> None:
        """``unicode``: whether the output can show more than ASCII."""
        self.columns = columns
        self.terminal = terminal
        self.width = max(40, min(columns - 1, _WIDEST))
        self.color = color
        self._unicode = unicode
        self._console = Console(
            file=io.StringIO(),
            width=columns if terminal else _UNLIMITED,
            height=25,
            force_terminal=color,
            color_system="standard" if color else None,
            no_color=not color,
            markup=False,
            emoji=False,
            highlight=False,
            legacy_windows=False,
        )

    def paragraph(self, text: str, style: str = "", head: str | Text = "") -> Text:
        """Wrap ``text`` to the right of ``head``. Numbers keep their units. Long words such as
        paths and commands stay whole, so that users can copy them."""
        head = Text(head, style) if isinstance(head, str) else head
        # rich would cut long words or not wrap, and it breaks at no-break spaces.
        lines = textwrap.wrap(
            _UNIT.sub("\N{NO-BREAK SPACE}", text),
            self.width - head.cell_len,
            break_long_words=False,
            break_on_hyphens=False,
        )
        wrapped = f"\n{' ' * head.cell_len}".join(lines).replace("\N{NO-BREAK SPACE}", " ")
        return _unwrapped(head + Text(wrapped, style))

    def entry(self, title: str, text: str) -> Text:
        """``Model    100.4B parameters …``."""
        return self.paragraph(text, head=Text(f"{title:<9}", "bold"))

    def line(self, *parts: str | tuple[str, str]) -> Text:
        """Join texts, each with an optional style, into one line that is never wrapped or cut."""
        return _unwrapped(Text.assemble(*parts))

    def table(
        self,
        align: str,
        rows: Iterable[Sequence[RenderableType]],
        *,
        titles: Sequence[str] = (),
        styles: Sequence[str] = (),
        indent: int = 0,
        width: int | None = None,
    ) -> Table:
        """Return a table with two spaces, or ``indent``, between columns.

        ``align`` has a letter for each column: ``l`` left, ``r`` right, ``w`` left and wrapped if
        the terminal is too narrow, ``b`` the rest of ``width``. ``styles`` apply to the first rows.
        """
        columns = [
            Column(
                title,
                justify="right" if kind == "r" else "left",
                no_wrap=kind != "w",
                overflow="fold",
                ratio=1 if kind == "b" else None,
            )
            for kind, title in zip(align, titles or [""] * len(align), strict=True)
        ]
        table = Table(
            *columns,
            box=None,
            show_header=bool(titles),
            header_style="dim",
            padding=(0, 0, 0, indent) if indent else (0, 2, 0, 0),
            pad_edge=bool(indent),
            width=width,
        )
        for number, row in enumerate(rows):
            cells = [Text(cell) if isinstance(cell, str) else cell for cell in row]
            table.add_row(*cells, style=styles[number] if number < len(styles) else None)
        return table

    def fits(self, table: Table) -> bool:
        """Whether the table fits the width."""
        options = self._console.options.update(width=_UNLIMITED)
        return Measurement.get(self._console, options, table).maximum <= self.columns

    def sections(self, sections: Iterable[Iterable[RenderableType]]) -> str:
        """Draw the sections that are not empty, with an empty line between them."""
        return "\n".join(text for parts in sections if (text := self.draw(parts)))

    def draw(self, parts: Iterable[RenderableType]) -> str:
        """Draw each part on separate lines, without trailing spaces."""
        with self._console.capture() as captured:
            for part in parts:
                for line in Segment.split_lines(self._console.render(part)):
                    segments = Segments([*_stripped(line), Segment.line()])
                    self._console.print(segments, soft_wrap=True)
        text = captured.get()
        if self._unicode:
            return text
        return text.translate(_ASCII).encode("ascii", "replace").decode()


def _unwrapped(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ignore"
    return text


def _stripped(line: Sequence[Segment]) -> Iterator[Segment]:
    kept = [*line]
    while kept and not kept[-1].text.strip(" "):
        kept.pop()
    yield from kept[:-1]
    for last in kept[-1:]:
        yield Segment(last.text.rstrip(" "), last.style)
