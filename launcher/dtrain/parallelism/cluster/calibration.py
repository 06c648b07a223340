"""Measured efficiencies of the user's cluster, which replace the planner's defaults.

A calibration file is a JSON object. Every part is optional::

    {
      "schema": 1,
      "gemm": [{"m": 4096, "k": 8192, "n": 28672, "tflops": 251.0}],
      "collectives": [
        {"kind": "all_reduce", "ranks": 8, "hosts": 1, "bytes": 67108864, "seconds": 6.8e-4}
      ],
      "constants": {"attention": 0.45}
    }

``gemm`` are products of (m × k) with (k × n) in 16 bits, or in 32 on a device without. ``seconds``
is the time of a collective over ``bytes`` on each rank: the size before an all-reduce or a
reduce-scatter, or after an all-gather. ``constants`` sets fields of `Efficiency` and
overrides fitted values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from statistics import fmean
from typing import Any

from dtrain.diagnostics import UsageError
from dtrain.parallelism import json_file
from dtrain.parallelism.cluster.efficiency import Efficiency
from dtrain.parallelism.cluster.hardware import Gpu

SCHEMA = 1
LARGEST = 1e15
"""Largest number in the file, and the inverse of the smallest, so that no product overflows."""
_RING = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""How many times a rank's bytes pass through it, for many ranks."""


def read(text: str, where: str, base: Efficiency, gpu: Gpu, network: float) -> Efficiency:
    """Return ``base`` with the file's measurements; ``network`` is one host's, in GB/s.

    Raises:
        UsageError: the text is not a calibration file; names the position and the expected value.
    """
    table = json_file.parse(
        text, where, "a calibration file is a JSON object with gemm, collectives or constants"
    )
    return calibrated(table, where, base, gpu, network)


def calibrated(table: Any, where: str, base: Efficiency, gpu: Gpu, network: float) -> Efficiency:
    """Like `read`, for the content of a file."""
    if not isinstance(table, dict):
        raise UsageError(f"{where}: holds {_kind(table)}, not an object")
    unknown = sorted(set(table) - {"schema", "gemm", "collectives", "constants"})
    if unknown:
        raise UsageError(
            f"{where}: no such part: {', '.join(unknown)}",
            hint="the parts are gemm, collectives and constants",
        )
    if table.get("schema", SCHEMA) != SCHEMA:
        raise UsageError(f"{where}: schema {table['schema']!r} is not {SCHEMA}")
    found = base
    products = _rows(table, "gemm", where, ("m", "k", "n", "tflops"))
    if products:
        found = replace(found, **_gemm(products, base, gpu))
    rows = _rows(table, "collectives", where, ("ranks", "hosts", "bytes", "seconds"), "kind")
    near = [row for row in rows if row["hosts"] == 1]
    far = [row for row in rows if row["hosts"] > 1]
    if near:
        found = replace(found, **_wire(near, "link", "latency", gpu.link_among, found))
    if far:
        found = replace(found, **_wire(far, "network", "network_step", lambda _: network, found))
    return replace(found, **_constants(table, where))


def _gemm(products: Sequence[dict[str, float]], base: Efficiency, gpu: Gpu) -> dict[str, float]:
    """Fit a straight line to relative errors: seconds = (FLOP + half) / best.

    ``half`` is stored for a GPU of 312 TFLOP/s and scales with the peak, as in `Kernels`.
    """
    peak = gpu.peak(gpu.usual)
    able = peak * gpu.sustained
    flop = [2 * row["m"] * row["k"] * row["n"] for row in products]
    seconds = [size / row["tflops"] / 1e12 for size, row in zip(flop, products, strict=True)]
    slope, start = _line(flop, seconds)
    if start is None:
        half = base.gemm_half * peak / 312
        slope = math.fsum(s / (f + half) for s, f in zip(seconds, flop, strict=True)) / len(flop)
        return {"gemm": min(1.0, 1 / (slope * able * 1e12))}
    return {
        "gemm": min(1.0, 1 / (slope * able * 1e12)),
        "gemm_half": max(0.0, start / slope) * 312 / peak,
    }


def _wire(
    rows: Sequence[dict[str, Any]],
    share: str,
    step: str,
    bandwidth: Callable[[int], float],
    base: Efficiency,
) -> dict[str, float]:
    """Fit the share of a wire, and the step that collectives start with. ``bandwidth``: GB/s of the
    wire for a number of ranks."""
    size = [row["bytes"] * (row["ranks"] - 1) / row["ranks"] for row in rows]
    # Seconds on the whole wire.
    sent = [one / (bandwidth(int(row["ranks"])) * 1e9) for one, row in zip(size, rows, strict=True)]
    seconds = [row["seconds"] / _RING[row["kind"]] for row in rows]
    # On a mesh, one size takes longer among fewer ranks, which does not show what a start costs.
    slope, start = _line(sent, seconds) if max(size) >= 2 * min(size) else (0.0, None)
    found = {}
    if start is None:
        moved = [
            max(taken - _start(row, base), 0.1 * taken)
            for row, taken in zip(rows, seconds, strict=True)
        ]
        slope = fmean(taken / least for taken, least in zip(moved, sent, strict=True))
    else:
        # A start is linear in its steps.
        none, one = (fmean(_start(row, replace(base, **{step: x})) for row in rows) for x in (0, 1))
        found[step] = max(0.0, (start - none) / (one - none))
    return {share: min(1.0, 1 / slope), **found}


def _start(row: dict[str, Any], base: Efficiency) -> float:
    """Seconds until data have passed through all ranks, as in `Group`."""
    start = base.tree_start if row["kind"] == "all_reduce" else base.ring_start
    return start(row["ranks"], row["hosts"])


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float | None]:
    """Slope and start of y = slope·x + start by least squares of relative errors.

    The start is None if all sizes are about equal, or if the measurements scatter so much that no
    line rises: then only a slope can be fitted.
    """
    if max(x) < 2 * min(x):
        return 0.0, None
    weights = [1 / value**2 for value in y]
    total = math.fsum(weights)
    mean_x = math.fsum(w * value for w, value in zip(weights, x, strict=True)) / total
    mean_y = math.fsum(w * value for w, value in zip(weights, y, strict=True)) / total
    spread = math.fsum(w * (value - mean_x) ** 2 for w, value in zip(weights, x, strict=True))
    both = math.fsum(w * (a - mean_x) * (b - mean_y) for w, a, b in zip(weights, x, y, strict=True))
    slope = both / spread
    if slope <= 0:
        return 0.0, None
    return slope, mean_y - slope * mean_x


def _constants(table: dict[str, Any], where: str) -> dict[str, float]:
    constants = table.get("constants", {})
    if not isinstance(constants, dict):
        raise UsageError(f"{where}: constants: {_kind(constants)}, not an object")
    known = [field.name for field in fields(Efficiency)]
    for name, value in constants.items():
        if name not in known:
            raise UsageError(
                f"{where}: constants: no constant {name!r}", hint=f"known: {', '.join(known)}"
            )
        _check_positive(value, f"{where}: constants: {name}")
    return {name: float(value) for name, value in constants.items()}


def _rows(
    table: dict[str, Any], part: str, where: str, numbers: Iterable[str], kind: str = ""
) -> list[dict[str, Any]]:
    rows = table.get(part, [])
    if not isinstance(rows, list):
        raise UsageError(f"{where}: {part}: must be a list, not {_kind(rows)}")
    for place, row in enumerate(rows):
        at = f"{where}: {part}[{place}]"
        if not isinstance(row, dict):
            raise UsageError(f"{at}: {_kind(row)}, not an object")
        for name in numbers:
            if name not in row:
                raise UsageError(f"{at}: no {name}")
            _check_positive(row[name], f"{at}: {name}")
        if kind and row.get(kind) not in list(_RING):
            raise UsageError(
                f"{at}: {kind} is {row.get(kind)!r}", hint=f"known: {', '.join(_RING)}"
            )
        if kind and row["ranks"] < 2:
            raise UsageError(f"{at}: a collective needs at least two ranks")
    return rows


def _check_positive(value: object, name: str) -> None:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
    if not 1 / LARGEST <= number <= LARGEST:
        raise UsageError(f"{name} is {value!r}, not a positive number (at most 1e15)")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return names.get(type(value), "null" if value is None else "a number")
