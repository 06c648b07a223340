"""Measurements of `dtrain check --bandwidth`: tables of all-reduces and of links. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dtrain.checks.bandwidth import Collective, MeasuredFabric
from dtrain.framing import clean
from dtrain.wording import counted

if TYPE_CHECKING:
    from rich.text import Text

    from dtrain_cli.views.paper import Paper

_WIDEST = 16
"""Up to this many hosts, all links are shown; above it, only slow ones."""
_CELL = 8


def as_text(found: MeasuredFabric, hosts: Sequence[str], paper: Paper) -> Iterator[Text]:
    """Yield the lines, with slow links marked."""
    for title, across in (("across all hosts", True), ("inside a host", False)):
        rows = [one for one in found.collectives if (one.hosts > 1) == across]
        if rows:
            ranks = counted(rows[0].ranks, "rank")
            yield paper.line((f"all-reduce {title} ({ranks}, {found.backend})", "bold"))
            yield from (paper.line(_collective(row)) for row in rows)
            yield paper.line()
    if found.links:
        yield from _links(found, hosts, paper)


def _collective(one: Collective) -> str:
    size = f"{one.size >> 20} MiB" if one.size >= 1 << 20 else f"{one.size >> 10} KiB"
    return f"{size:>9} {one.seconds * 1e3:>10.3f} ms {one.bus / 1e9:>9.3f} GB/s on the wire"


def _links(found: MeasuredFabric, hosts: Sequence[str], paper: Paper) -> Iterator[Text]:
    usual = _rate(found.usual)
    title = f"GB/s from the host on the left to the host above; {usual} is typical"
    yield paper.line((title, "bold"))
    if len(hosts) > _WIDEST:
        for pair, rate in sorted(found.slow.items(), key=lambda item: item[1]):
            yield paper.line(f"{_rate(rate):>9}  {clean(' to '.join(pair))}")
        others = len(found.links) - len(found.slow)
        yield paper.line(f"the other {others} links are as fast as usual")
        yield paper.line()
        return
    width = max(_CELL, *(len(clean(host)) + 2 for host in hosts))
    yield paper.line(" " * width, *(f"{clean(host):>{width}}" for host in hosts))
    for row in hosts:
        cells = []
        for column in hosts:
            pair = (row, column)
            link = found.links.get(pair)
            slow = pair in found.slow
            text = "-" if link is None else f"{_rate(link)}{' !' if slow else '  '}"
            cells.append((f"{text:>{width}}", "red" if slow else ""))
        yield paper.line(f"{clean(row):<{width}}", *cells)
    yield paper.line()


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.3g}"


def as_document(found: MeasuredFabric) -> dict[str, Any]:
    """Return the same as a JSON document."""
    return {
        "backend": found.backend,
        "all_reduce": [
            {
                "hosts": one.hosts,
                "ranks": one.ranks,
                "bytes": one.size,
                "seconds": one.seconds,
                "bus_bytes_per_second": one.bus,
            }
            for one in found.collectives
        ],
        "links": [
            {"hosts": list(pair), "bytes_per_second": rate, "slow": pair in found.slow}
            for pair, rate in found.links.items()
        ],
    }
