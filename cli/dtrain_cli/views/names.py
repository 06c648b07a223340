"""Format hosts, ranks, paths and durations for users. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from dtrain import hostlist
from dtrain.framing import clean
from dtrain.hostlist import fold, in_order
from dtrain.launchplan.names import fold_numbers
from dtrain.wording import plural

_COLORS = ("cyan", "green", "yellow", "magenta", "blue")
"""Colors of prefixes, each also used bright; red is only for errors."""

MARKS = {
    "error": "bold red",
    "problem": "bold yellow",
    "warning": "bold yellow",
    "hint": "bold cyan",
}
"""The styles of the words that begin messages."""


@lru_cache(1 << 14)
def prefix(host: str, label: str, host_width: int = 0, label_width: int = 0) -> str:
    """``[gpu01  3] ``, padded so that the lines of all ranks start in the same column."""
    return f"[{clean(host):<{host_width}} {clean(label):>{label_width}}] "


@lru_cache(1 << 14)
def paint(text: str, style: str) -> str:
    """``text`` in one of rich's styles, as terminal escape sequences."""
    # Output into a pipe needs no rich, which is slow to import.
    from rich.color import ColorSystem
    from rich.style import Style

    return Style.parse(style).render(text, color_system=ColorSystem.STANDARD)


def marked(line: str) -> str:
    """``line`` with the word in color that says what kind of message it is."""
    word, colon, rest = line.partition(":")
    return paint(f"{word}:", MARKS[word]) + rest if colon and word in MARKS else line


def color_of(host: str, label: str) -> str:
    """The style of a rank: the same in every run."""
    number = int(label) if label.isdecimal() else zlib.crc32(f"{host} {label}".encode())
    bright, color = divmod(number % (2 * len(_COLORS)), len(_COLORS))
    return f"bright_{_COLORS[color]}" if bright else _COLORS[color]


def hosts(names: Iterable[str]) -> str:
    """All names, folded: ``gpu[01-08]``."""
    return clean(fold(names))


def brief(names: Iterable[str]) -> str:
    """Hosts for a notice or a row of a table: of a long list, only the first."""
    return clean(hostlist.brief(names))


def labels(names: Iterable[str]) -> str:
    """Ranks and other labels, folded: ``0-63``, ``0-3,8``, ``ps[0-1]``."""
    names = list(names)
    ranks = fold_numbers(int(name) for name in names if name.isdecimal())
    others = fold(dict.fromkeys(name for name in names if not name.isdecimal()))
    return ",".join(filter(None, (ranks, others)))


def workers(names: Sequence[str]) -> str:
    """Labels in words: ``rank 3``, ``ranks 0-3,8``, ``ranks 0-3, ps[0-1]``."""
    ranks = [name for name in names if name.isdecimal()]
    others = [name for name in names if not name.isdecimal()]
    who = [f"{plural(len(ranks), 'rank')} {labels(ranks)}"] if ranks else []
    return ", ".join([*who, labels(in_order(others))] if others else who)


def path(text: str) -> str:
    """A path with the home folder as ``~``."""
    try:
        home = str(Path.home())
    except RuntimeError:
        return clean(text)
    if home != "/" and (text == home or text.startswith(f"{home}/")):
        text = f"~{text[len(home) :]}"
    return clean(text)


def spent(seconds: float) -> str:
    """How long something took: like `duration`, but with a tenth of a second if it was short."""
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


def duration(seconds: float) -> str:
    """``41 s``, ``3 min 20 s``, ``2 h 5 min``, ``9 d 4 h``."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400:,} d {whole % 86400 // 3600} h"
