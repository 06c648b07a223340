"""AMD's GPUs, from amd-smi or rocm-smi."""

from __future__ import annotations

import contextlib
import json
import re
import time

from dtrain.node.telemetry.tool import FIELDS, MAX_GPUS, STALE, Tool, combined, number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

AMD_SMI = ("usage", "power", "clock", "temperature", "ecc", "mem-usage", "json")
ROCM_SMI = ("use", "power", "maxpower", "temp", "clocks")
ARGUMENTS = (
    # Before ROCm 6.3, and in virtual machines, amd-smi does not know --throttle.
    ("amd-smi", ["metric", *("--" + name for name in ("throttle", *AMD_SMI))]),
    ("amd-smi", ["metric", *("--" + name for name in AMD_SMI)]),
    ("rocm-smi", [*("--show" + name for name in ROCM_SMI), "--showmeminfo", "vram", "--json"]),
)
HEAT, POWER = 0x40, 0x04
"""NVML's bits of reasons for a lower clock."""
VIOLATIONS = {
    "prochot": HEAT,
    "socket_thermal": HEAT,
    "vr_thermal": HEAT,
    "hbm_thermal": HEAT,
    "ppt": POWER,
}
"""What amd-smi calls the limits of a GPU. Its `throttle_status` does not tell heat from the normal
power limit."""
INACTIVE = "NOT ACTIVE"
PAUSE = 20.0
"""Seconds between two runs of a tool: each takes half a second of a core."""
MAX_OUTPUT = 1 << 20
CARD = r"card\d{1,4}"


class Amd:
    """Runs a tool now and then: none has a mode that keeps printing."""

    def __init__(self, commands: list[list[str]]) -> None:
        """``commands``: those of the tools, the best first."""
        self._commands = commands
        self._tool: Tool | None = None
        self._next_start = 0.0
        self._output = b""
        self._rows: list[list[Any]] = []
        self._rows_at = 0.0

    def read(self, _xids: dict[str, int]) -> list[list[Any]]:
        now = time.monotonic()
        if self._tool is not None and not self._tool.ended:
            self._output = (self._output + self._tool.read())[:MAX_OUTPUT]
            if self._tool.ended:
                self._keep_rows(now)
            elif now >= self._next_start:
                self._tool.stop()
                self._try_next()
        elif now >= self._next_start:
            self._next_start, self._output = now + PAUSE, b""
            with contextlib.suppress(OSError):
                self._tool = Tool(self._commands[0])
        return self._rows if now - self._rows_at < PAUSE + STALE else []

    def _keep_rows(self, now: float) -> None:
        rows = rows_of(self._output)
        if rows:
            self._rows, self._rows_at = rows, now
        else:
            self._try_next()

    def _try_next(self) -> None:
        if len(self._commands) > 1:
            del self._commands[0]
            self._next_start = 0.0

    def stop(self) -> None:
        if self._tool is not None:
            self._tool.stop()


def rows_of(output: bytes) -> list[list[Any]]:
    """A row for each GPU in the JSON that a tool prints."""
    start = re.search(rb"^[\[{]", output, re.MULTILINE)  # after warnings
    try:
        found = json.loads(output[start.start() :]) if start else {}
        found = found.get("gpu_data", found) if isinstance(found, dict) else found
        if isinstance(found, list):
            gpus = {int(gpu["gpu"]): amd_row(gpu) for gpu in found[:MAX_GPUS]}
        else:
            cards = {
                int(name[4:]): card for name, card in found.items() if re.fullmatch(CARD, name)
            }
            gpus = {index: rocm_row(cards[index]) for index in cards}
        return [[index, *map(gpus[index].get, FIELDS[1:])] for index in sorted(gpus)[:MAX_GPUS]]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []


def amd_row(gpu: dict[str, Any]) -> dict[str, Any]:
    """The values of a GPU from amd-smi."""

    def value(*path: str) -> float | None:
        found: Any = gpu
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        if isinstance(found, dict):  # {"value": 148, "unit": "W"}
            found = found.get("value")
        return None if found is None else number(str(found))

    def count(name: str) -> int | None:
        found = value("ecc", name)
        return None if found is None else int(found)

    hotspot = value("temperature", "hotspot")
    throttle = gpu.get("throttle")
    known = throttle if isinstance(throttle, dict) else {}
    states = [(known.get(name + "_violation_status"), bit) for name, bit in VIOLATIONS.items()]
    slowed = [bit * (state == "ACTIVE") for state, bit in states if state in ("ACTIVE", INACTIVE)]
    return {
        "use": value("usage", "gfx_activity"),
        "memory_used": value("mem_usage", "used_vram"),
        "memory_total": value("mem_usage", "total_vram"),
        "power": value("power", "socket_power"),
        "temperature": hotspot if hotspot is not None else value("temperature", "edge"),
        "clock": value("clock", "gfx_0", "clk"),
        "clock_max": value("clock", "gfx_0", "max_clk") or None,
        "slowed": combined(slowed) if slowed else None,
        "ecc": count("total_uncorrectable_count"),
        "xids": 0,
        "memory_use": value("usage", "umc_activity"),
        "memory_clock": value("clock", "mem_0", "clk"),
        "ecc_corrected": count("total_correctable_count"),
    }


def rocm_row(card: dict[str, Any]) -> dict[str, Any]:
    """The values of a GPU from rocm-smi."""
    words = {name.lower(): str(value) for name, value in card.items()}

    def value(pattern: str) -> float | None:
        found = (number(words[name]) for name in words if re.search(pattern, name))
        return next((one for one in found if one is not None), None)

    used, total = value(r"vram total used memory"), value(r"vram total memory")
    return {
        "use": value(r"gpu use \(%\)"),
        "memory_used": None if used is None else int(used) >> 20,
        "memory_total": None if total is None else int(total) >> 20,
        "power": value(r"^(average|current).*power \(w\)"),
        "power_limit": value(r"^max.*power \(w\)"),
        "temperature": value(r"temperature \(sensor junction\)") or value(r"temperature"),
        "clock": value(r"sclk clock speed"),
        "xids": 0,
        "memory_clock": value(r"mclk clock speed"),
    }
