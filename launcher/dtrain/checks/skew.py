"""Telling which hosts differ from the rest. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dtrain import hostlist


@dataclass(frozen=True, slots=True)
class Outlier:
    """Hosts that share a value which most do not."""

    hosts: tuple[str, ...]
    seen: str
    """``2.12.0; 2.13.0 on gpu[01-07]``."""
    usual: str
    """What most have; where no value is more common than the others, that of the first host."""


def outliers(values: Mapping[str, str]) -> Iterator[Outlier]:
    """Those of ``values`` (by host) that differ from the most common one.

    Where two values are equally common nobody can tell which one is wrong: then all hosts are
    named together.
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
        seen = "; ".join(f"{value} on {folded(hosts)}" for value, hosts in by_value.items())
        yield Outlier(tuple(values), seen, first)
        return
    for value, hosts in ranked[1:]:
        yield Outlier(tuple(hosts), f"{value}; {usual} on {folded(most)}", usual)


def folded(hosts: Sequence[str]) -> str:
    return hostlist.fold(hosts)
