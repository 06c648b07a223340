"""Finds hosts that differ from the rest. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from dtrain import hostlist
from dtrain.checks.finding import Finding, error, warning
from dtrain.records import dataclass

_FEW = 5


@dataclass(frozen=True, slots=True)
class Outlier:
    """Hosts that share an unusual value."""

    hosts: tuple[str, ...]
    seen: str
    """``2.12.0; 2.13.0 on gpu[01-07]``."""
    usual: str
    """The most common value; in a tie, the value of the first host."""

    def error(self, subject: str, expected: str, remedy: str) -> Finding:
        return error(subject, self.hosts, self.seen, expected, remedy)

    def warning(self, subject: str, expected: str, remedy: str) -> Finding:
        return warning(subject, self.hosts, self.seen, expected, remedy)


def outliers(values: Mapping[str, str]) -> Iterator[Outlier]:
    """The hosts in ``values`` (by host) whose value is not the most common one.

    If two values are equally common, it is unknown which one is wrong: one outlier then lists all
    hosts.
    """
    by_value: dict[str, list[str]] = {}
    for host, value in values.items():
        by_value.setdefault(value, []).append(host)
    if len(by_value) < 2:
        return
    ranked = sorted(by_value.items(), key=lambda item: -len(item[1]))
    (usual, most), (_, second) = ranked[:2]
    if len(most) == len(second):
        first = next(iter(values.values()))
        seen = "; ".join(f"{value} on {hostlist.fold(hosts)}" for value, hosts in by_value.items())
        yield Outlier(tuple(values), seen, first)
        return
    for value, hosts in ranked[1:]:
        yield Outlier(tuple(hosts), f"{value}; {usual} on {hostlist.fold(most)}", usual)


def differing(tables: Mapping[str, Mapping[str, str]]) -> dict[str, set[str]]:
    """By host, the keys whose value (or absence) is not the most common one.

    If two values are equally common, every host is listed.
    """
    found: dict[str, set[str]] = {}
    for key in set().union(*tables.values()):
        counts = Counter(table.get(key) for table in tables.values())
        ranked = counts.most_common()
        tie = len(ranked) > 1 and ranked[0][1] == ranked[1][1]
        for host, table in tables.items():
            if len(ranked) > 1 and (tie or table.get(key) != ranked[0][0]):
                found.setdefault(host, set()).add(key)
    return found


def first_of(items: Sequence[str]) -> str:
    """The first few of them, and the number of the others."""
    more = f" and {len(items) - _FEW} more" if len(items) > _FEW else ""
    return f"{', '.join(items[:_FEW])}{more}"
