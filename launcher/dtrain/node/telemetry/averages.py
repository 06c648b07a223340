"""Averages of samples."""

from __future__ import annotations

from dtrain.node.telemetry.tool import FIELDS, combined

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable

    from dtrain.node.agent.wire import Json

MAXIMA = ("memory_used", "temperature", "ecc", "xids", "ecc_corrected", "others", "others_memory")


def average(window: list[Json]) -> Json:
    """The averages of samples: of each number the mean, of memory and temperature the maximum, and
    all reasons for a slow clock."""
    last = window[-1]
    if len(window) == 1:
        return last
    found: Json = {"time": window[0]["time"], "cpus": last["cpus"]}
    found["cpu"] = mean([one["cpu"] for one in window], 2)
    found["memory"] = highest([one["memory"] for one in window])
    found["storage"] = last["storage"]
    found["losses"] = mean([one["losses"] for one in window], 2)
    found["round_trip"] = mean([one["round_trip"] for one in window], 3)
    for name in ("disk", "network", "infiniband"):
        pairs = [one[name] for one in window if one[name] is not None]
        found[name] = [mean(column, 0) for column in zip(*pairs)] if pairs else None
    found["gpus"] = [gpu_average(rows) for rows in grouped(window, "gpus")]
    found["ranks"] = []
    for rows in grouped(window, "ranks"):
        names, cpu, memory, files = zip(*rows)
        found["ranks"].append([names[-1], mean(cpu, 2), highest(memory), highest(files)])
    return found


def gpu_average(rows: list[list[Any]]) -> list[Any]:
    found: list[Any] = []
    for name, column in zip(FIELDS, zip(*rows)):
        if name == "slowed":
            bits = [value for value in column if value is not None]
            found.append(combined(bits) if bits else None)
        elif name in MAXIMA or name in ("index", "memory_total"):
            found.append(highest(column))
        else:
            found.append(mean(column, 1))
    return found


def grouped(window: list[Json], name: str) -> list[list[Any]]:
    """The rows of each GPU or process of the last sample."""
    rows: dict[Any, list[Any]] = {row[0]: [] for row in window[-1][name]}
    for one in window:
        for row in one[name]:
            if row[0] in rows:
                rows[row[0]].append(row)
    return list(rows.values())


def mean(values: Iterable[Any], digits: int) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), digits) if known else None


def highest(values: Iterable[Any]) -> Any:
    return max((value for value in values if value is not None), default=None)
