"""The GPUs of this host, from their vendor's tool."""

from __future__ import annotations

import os

from dtrain.node.telemetry.amd import ARGUMENTS, Amd
from dtrain.node.telemetry.nvidia import Nvidia

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.telemetry.nvidia import Own

FIELDS = (
    "index",
    "use",  # percent
    "memory_used",  # MiB
    "memory_total",
    "power",  # W
    "power_limit",
    "temperature",  # degrees Celsius
    "clock",  # MHz
    "clock_max",
    "slowed",  # NVML's bits of reasons for a lower clock
    "ecc",  # uncorrected errors since the boot
    "xids",  # Xid errors since the start of the run
    "memory_use",  # percent of the time in which memory was read or written
    "memory_clock",  # MHz
    "ecc_corrected",  # since the boot
    "others",  # processes outside this run
    "others_memory",  # MiB that these have
)


def gpu_tool(own: Own) -> Nvidia | Amd | None:
    """The tool of this host's GPUs, if it has one. ``own``: whether a process is marked as one of
    the run."""
    nvidia = find("nvidia-smi")
    if nvidia:
        return Nvidia(nvidia, own)
    amd = [[path, *arguments] for name, arguments in ARGUMENTS if (path := find(name))]
    return Amd(amd) if amd else None


def find(program: str) -> str | None:
    """The path of a program."""
    for folder in os.environ.get("PATH", "").split(":"):
        path = os.path.join(folder, program)
        if folder.startswith("/") and os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return None
