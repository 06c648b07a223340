"""The status lines at the bottom of the terminal. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.text import Text

from dtrain.framing import clean
from dtrain_cli.views import names

BAD = ("unreachable", "lost", "failed")
_ORDER = (
    "queued",
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
    """The content of the status lines. ``hosts`` maps each host to its state."""

    run: str = ""
    workers: int = 0
    hosts: dict[str, str] = field(default_factory=dict)
    progress: tuple[str, str] = ("", "")
    """The job's reported progress. Without reports, a prefix and the last line of the worker with
    the lowest rank."""

    def lines(self, columns: int, rows: int, seconds: float) -> list[str]:
        """Return at most three lines, none wider than the terminal. With the empty line above
        them, they fill at most half of its height."""
        if not self.run:
            return []
        width = max(1, columns - 1)  # A full last column makes some terminals wrap.
        title = f"── {clean(self.run)} · {state(self.hosts)} · {names.duration(seconds)} "
        title = fit(title, width)
        lines = [title + "─" * (width - cell_len(title))]
        lines.append(fit(f"   {summary(self.hosts, self.workers)}", width))
        head, text = self.progress
        if text:
            # Expand tabs here: in a terminal, their width depends on the column.
            lines.append(fit(f"   {clean(head + text).expandtabs(4)}", width))
        return lines[: max(0, rows // 2 - 1)]


def state(hosts: Mapping[str, str]) -> str:
    """One word for the whole run."""
    states = set(hosts.values())
    if states & {"stopping", *BAD}:
        return "stopping"
    if "ended" in states:
        return "ending"
    return states.pop() if states in ({"queued"}, {"running"}) else "starting"


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
        text = f"{count} {word or 'waiting'}"
    else:
        text = f"{count}: {', '.join(parts)}"
    return f"{text} · {names.count(workers, 'worker')}"


def fit(text: str, width: int) -> str:
    """Cut ``text`` to ``width`` columns; an ellipsis marks the cut."""
    fitted = Text(text)
    fitted.truncate(width, overflow="ellipsis")
    return fitted.plain
