"""The few lines at the bottom of the terminal that say how the run goes. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field

from dtrain.framing import clean
from dtrain_cli.views import names

BAD = ("unreachable", "lost", "failed")
_ORDER = (
    "connecting",
    "attaching",
    "checking",
    "syncing",
    "preparing",
    "ready",
    "running",
    "stopping",
    "ended",
)
_MAX_NAMES = 3


@dataclass(slots=True)
class Header:
    """What is shown. ``hosts`` has the state of each."""

    run: str = ""
    workers: int = 0
    hosts: dict[str, str] = field(default_factory=dict)
    progress: tuple[str, str] = ("", "")
    """What the job says of its progress; where it says nothing, a prefix and the last line of the
    worker with the lowest rank."""

    def lines(self, columns: int, rows: int, seconds: float) -> list[str]:
        """At most three lines, none wider than the terminal, and no more than half its height."""
        if not self.run:
            return []
        width = max(1, columns - 1)  # A full last column makes some terminals wrap.
        title = f"── {clean(self.run)} · {state(self.hosts)} · {names.duration(seconds)} "
        title = fit(title, width)
        title += "─" * (width - cells(title))
        lines = [title, fit(f"   {summary(self.hosts, self.workers)}", width)]
        head, text = self.progress
        if text:
            # Spread here what a terminal would: the width of a tab depends on where it stands.
            lines.append(fit(f"   {clean(head + text).expandtabs(4)}", width))
        return lines[: max(1, rows // 2)]


def state(hosts: Mapping[str, str]) -> str:
    """One word for the whole run."""
    states = set(hosts.values())
    if states & {"stopping", *BAD}:
        return "stopping"
    if "ended" in states:
        return "ending"
    return "running" if states == {"running"} else "starting"


def summary(hosts: Mapping[str, str], workers: int) -> str:
    """``8 hosts running · 64 workers``, ``8 hosts: 7 running, gpu03 failed · 64 workers``."""
    groups: dict[str, list[str]] = {}
    for host, word in hosts.items():
        groups.setdefault(word, []).append(host)
    parts = [f"{len(groups[word])} {word}" for word in _ORDER if word in groups]
    for word in BAD:
        if those := groups.get(word):
            who = names.hosts(those) if len(those) <= _MAX_NAMES else str(len(those))
            parts.append(f"{who} {word}")
    waiting = len(groups.get("", ()))
    parts += [f"{waiting} waiting"] if waiting else []
    count = names.count(len(hosts), "host")
    if len(groups) == 1 and (word := next(iter(groups))) not in BAD:
        said = f"{count} {word or 'waiting'}"
    else:
        said = f"{count}: {', '.join(parts)}"
    return f"{said} · {names.count(workers, 'worker')}"


def cells(text: str) -> int:
    """Columns that printable text takes."""
    return len(text) if text.isascii() else sum(map(_cell, text))


def fit(text: str, width: int) -> str:
    """``text`` cut to ``width`` columns, with an ellipsis where something is missing."""
    if cells(text) <= width:
        return text
    used = 0
    for end, character in enumerate(text):
        used += _cell(character)
        if used > width - 1:
            return f"{text[:end]}…"
    return text


def _cell(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
