"""Draws several runs as lines for a screen. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from dtrain.framing import clean
from dtrain.wording import counted
from dtrain_cli.views import names
from dtrain_cli.views.board import Board, state, summary
from dtrain_cli.views.dashboard import first, fitted, totals, words


def draw(boards: Sequence[Board], columns: int, rows: int, now: float) -> list[Text]:
    """Exactly ``rows`` lines: for each run its state, progress, load and worst trouble."""
    count = counted(len(boards), "run")
    lines = [Text(f" {count} · `dtrain top RUN` shows one", "bold")]
    left = rows - 1
    for number, board in enumerate(boards):
        entry = _entry(board, columns, now)
        if len(entry) > left - (number + 1 < len(boards)):
            lines.append(Text(f" … {counted(len(boards) - number, 'more run')}"))
            break
        lines += entry
        left -= len(entry)
    return fitted(lines, columns, rows)


def attach_hint(run: str) -> str:
    return f"`dtrain attach {clean(run)}` takes charge of it and shows it"


def _entry(board: Board, columns: int, now: float) -> list[Text]:
    states = {name: host.state for name, host in board.hosts.items()}
    title = Text(f" {clean(board.run)}", "bold")
    word = state(states.values())
    parts = [] if len(set(states.values())) == 1 else [word]
    parts += [names.duration(now - board.began), summary(states, board.workers)]
    if board.attempt.number > 1:
        parts.append(f"attempt {board.attempt.number}")
    title.append(f"  {' · '.join(parts)}", "")
    lines = [Text(), title]
    if not board.attended:  # what is known of it is old
        return [*lines, Text(f"   no launcher; {attach_hint(board.run)}")]
    if text := board.progress.fitted(columns - 3):
        lines.append(Text(f"   {clean(text)}"))
    if text := totals(board, columns - 3, most=2):
        lines.append(Text(f"   {text}"))
    worst = first(words(board, board.troubles(), now), 1, columns - 2)
    return [*lines, *(Text("  ").append_text(line) for line in worst)]
