"""The few lines at the bottom of the terminal that say how the run goes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.text import Text

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
        """At most three lines, none wider than the terminal; with the empty line above them they
        take no more than half its height."""
        if not self.run:
            return []
        width = max(1, columns - 1)  # A full last column makes some terminals wrap.
        title = f"── {clean(self.run)} · {state(self.hosts)} · {names.duration(seconds)} "
        title = fit(title, width)
        lines = [title + "─" * (width - cell_len(title))]
        lines.append(fit(f"   {summary(self.hosts, self.workers)}", width))
        head, text = self.progress
        if text:
            # Spread here what a terminal would: the width of a tab depends on where it stands.
            lines.append(fit(f"   {clean(head + text).expandtabs(4)}", width))
        return lines[: max(0, rows // 2 - 1)]


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


def fit(text: str, width: int) -> str:
    """``text`` cut to ``width`` columns, with an ellipsis where something is missing."""
    fitted = Text(text)
    fitted.truncate(width, overflow="ellipsis")
    return fitted.plain
