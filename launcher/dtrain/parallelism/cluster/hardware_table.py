"""The table of known GPUs and machines.

The figures are in ``hardware.json``; a user's file of the same format extends it. It is JSON
because JSON loads in 1 ms and YAML in 30 ms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from dtrain.diagnostics import UsageError
from dtrain.parallelism import json_file
from dtrain.parallelism.cluster.hardware import MAX_GPUS, PRECISIONS, Gpu, GpuCluster, Machine
from dtrain.parallelism.names import find, key, nearest
from dtrain.records import dataclass

NIC_GBPS = 200.0
"""Gb/s of one usual NIC of a host with GPUs (ConnectX-6)."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A table of GPUs and machines, with lookup by name."""

    gpus: tuple[Gpu, ...]
    machines: tuple[Machine, ...]

    def gpu(self, name: str) -> Gpu:
        """Return the GPU with this name or alias in any case, or with this ``nvidia-smi`` name.

        Raises:
            UsageError: no GPU has this name; suggests the nearest.
        """
        otherwise = (
            "Describe another with `hardware=FILE`; 'dtrain help models' lists those it knows"
        )
        return find([name], self.gpus, "GPU", otherwise)

    def machine(self, name: str) -> Machine:
        """Return the machine with this name or alias, such as ``dgx-a100`` or ``p4d``.

        Raises:
            UsageError: no machine has this name; suggests the nearest.
        """
        otherwise = "Set `gpus_per_host` and `network_gbps` instead"
        return find([name], self.machines, "machine", otherwise)

    def cluster(
        self,
        gpu: Gpu,
        gpus: int,
        *,
        gpus_per_host: int | None = None,
        network_gbps: float | None = None,
    ) -> GpuCluster:
        """Return a cluster of ``gpus`` GPUs. Values left out come from the GPU's usual machine.

        ``network_gbps`` is of one host, all NICs together, one way, in Gb/s.

        Raises:
            UsageError: a number is impossible, or the GPUs do not fill their hosts.
        """
        usual = self.machine(gpu.machine)
        per_host = usual.gpus_per_host if gpus_per_host is None else gpus_per_host
        # A part of a host's GPUs has the same part of its NICs, but at least one.
        least = min(usual.network_gbps, NIC_GBPS)
        part = max(least, usual.network_gbps * min(1.0, per_host / usual.gpus_per_host))
        network = part if network_gbps is None else network_gbps
        for name, value in (("gpus_per_host", per_host), ("gpus", gpus)):
            if not 1 <= value <= MAX_GPUS:
                raise UsageError(
                    f"`{name}={value}` is not a number of GPUs that dtrain plans for",
                    hint=f"at least 1, at most {MAX_GPUS:,}",
                )
        if not 0 < network < 1e9:
            raise UsageError(
                f"`network_gbps={network:g}` is not a bandwidth",
                hint="Gb/s of all NICs of one host together, such as 1600 for 8 × 200",
            )
        per_host = min(per_host, gpus)
        if gpus % per_host:
            full = gpus - gpus % per_host
            raise UsageError(
                f"`gpus={gpus}` does not fill hosts of {per_host}",
                hint=f"use {full} or {full + per_host}, or set `gpus_per_host`",
            )
        # Clouds and Slurm give a job with a part of a host's GPUs the same part of its memory.
        memory = usual.memory * per_host / usual.gpus_per_host
        return GpuCluster(gpu, gpus, per_host, network / 8, memory)

    def extended(self, text: str, where: str) -> Hardware:
        """Return the table extended by a user's JSON file, whose entries override equal names.

        ``where`` names the file in errors. The format is that of ``hardware.json``; an entry
        may name another in ``like`` and give only what differs.

        Raises:
            UsageError: the text is not such a table; names the position and the remedy.
        """
        table = _parse(text, where)
        gpus, machines = [*self.gpus], [*self.machines]
        for place, entry in _entries(table, "gpus", where):
            _add(gpus, _read(Gpu, entry, place, gpus))
        for place, entry in _entries(table, "machines", where):
            _add(machines, _read(Machine, entry, place, machines))
        extended = Hardware(tuple(gpus), tuple(machines))
        for place, entry in _entries(table, "gpus", where):
            if "machine" in entry:
                _checked(place, "machine", entry["machine"], extended.machine)
        for place, entry in _entries(table, "machines", where):
            if "gpu" in entry:
                _checked(place, "gpu", entry["gpu"], extended.gpu)
        return extended


@cache
def hardware() -> Hardware:
    """Return the table that comes with dtrain."""
    text = Path(__file__).with_name("hardware.json").read_text("utf-8")
    return Hardware((), ()).extended(text, "hardware.json")


# Reading a table. A rule converts a JSON value to the field's value, or raises ValueError with the
# requirement.

Rule = Callable[[Any], Any]


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a text")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("must be a list of texts")
    return tuple(_text(one) for one in value)


def _amount(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise ValueError("must be a number above 0")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 10**6:
        raise ValueError("must be a whole number above 0")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _speeds(value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or not value or not set(value) <= set(PRECISIONS):
        names = ", ".join(PRECISIONS)
        raise ValueError(f"must give TFLOP/s by precision, some of {names}")
    return {precision: _amount(speed) for precision, speed in value.items()}


_RULES: Mapping[str, Rule] = {
    "str": _text,
    "tuple[str, ...]": _texts,
    "float": _amount,
    "int": _count,
    "bool": _flag,
    "dict[str, float]": _speeds,
}
"""By the type of the field."""


def _parse(text: str, where: str) -> dict[str, Any]:
    table = json_file.parse(text, where, FORMAT)
    if not isinstance(table, dict) or not table or not set(table) <= {"gpus", "machines"}:
        raise UsageError(
            f'{where}: must hold "gpus", "machines" or both, and nothing else', hint=FORMAT
        )
    return table


FORMAT = (
    'write {"gpus": [{"name": "my-gpu", "like": "h100-80gb", "memory": 95.0}]}; memory is in GiB, '
    "bandwidth and link in GB/s, flops in TFLOP/s"
)


def _entries(table: dict[str, Any], part: str, where: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the entries of a part, each with its position for errors."""
    listed = table.get(part, [])
    if not isinstance(listed, list):
        raise UsageError(f"{where}: {part}: must be a list", hint=FORMAT)
    found = []
    for number, entry in enumerate(listed):
        if not isinstance(entry, dict):
            raise UsageError(f"{where}: {part}[{number}]: must be an object", hint=FORMAT)
        name = entry.get("name")
        found.append((f"{where}: {part}[{number}]" + (f" ({name})" if name else ""), entry))
    return found


Row = Any
"""``Gpu`` or ``Machine``; dataclasses have no common type that has both's fields."""


def _read(kind: type[Row], entry: dict[str, Any], place: str, known: Sequence[Row]) -> Row:
    values = _values(kind, entry, place)
    like = entry.get("like")
    needed = ["name"] if like else [one.name for one in fields(kind) if one.default is MISSING]
    missing = [name for name in needed if name not in values]
    if missing:
        verb = "are" if len(missing) > 1 else "is"
        raise UsageError(
            f"{place}: {', '.join(missing)} {verb} missing",
            hint='give them, or name an entry to take figures from: "like": "h100-80gb"',
        )
    if not like:
        return kind(**values)
    listed = "'dtrain help models' lists the known ones"
    model = _checked(place, "like", like, lambda name: find([name], known, "name", listed))
    if kind is Gpu:
        model = replace(model, sustained=_sustained(model, values))
    # Do not copy aliases and source: they belong to the other entry.
    return replace(model, **{"aliases": (), "source": f"like {model.name}", **values})


def _values(kind: type[Row], entry: dict[str, Any], place: str) -> dict[str, Any]:
    """The values of the entry's fields, without ``like``."""
    types = {one.name: str(one.type) for one in fields(kind)}
    values: dict[str, Any] = {}
    for name, value in entry.items():
        if name == "like":
            continue
        if name not in types:
            close = nearest(name, types)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(types)}"
            raise UsageError(f"{place}: {name} is not a key of {kind.__name__}", hint=hint)
        try:
            values[name] = _RULES[types[name]](value)
        except ValueError as error:
            raise UsageError(f"{place}: {name}: {error}, not {value!r}", hint=FORMAT) from None
    return values


def _sustained(model: Gpu, values: Mapping[str, Any]) -> float:
    """``sustained`` of a GPU like ``model`` with other ``values``: as in `at_its_clock`, the watts
    for each TFLOP/s of the peak grow with the cube of the clock."""
    if model.sustained == 1 or not model.watts:
        return model.sustained  # 1: `at_its_clock` reads the power itself
    power: float = values.get("watts", model.watts) / model.watts
    peak: float = values.get("flops", {}).get(model.usual, model.peak(model.usual))
    return model.sustained * math.pow(power * model.peak(model.usual) / peak, 1 / 3)


def _checked(place: str, field: str, name: Any, lookup: Callable[[str], Row]) -> Row:
    """Call ``lookup``, and prefix its error with the position."""
    try:
        return lookup(_text(name))
    except ValueError as error:
        raise UsageError(f"{place}: {field}: {error}, not {name!r}", hint=FORMAT) from None
    except UsageError as error:
        raise UsageError(f"{place}: {field}: {error.message}", hint=error.hint) from None


def _add(rows: list[Row], row: Row) -> None:
    """Append the row, and remove an earlier row with its name."""
    rows[:] = [other for other in rows if key(other.name) != key(row.name)]
    rows.append(row)
