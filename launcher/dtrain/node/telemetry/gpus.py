"""The GPUs of this host, from their vendor's tool."""

from __future__ import annotations

from dtrain.node.files import find_program
from dtrain.node.telemetry.amd import ARGUMENTS, Amd
from dtrain.node.telemetry.nvidia import Nvidia

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.telemetry.nvidia import Own


def gpu_tool(own: Own) -> Nvidia | Amd | None:
    """The tool of this host's GPUs, if it has one. ``own``: whether a process is marked as one of
    the run."""
    nvidia = find_program("nvidia-smi")
    if nvidia:
        return Nvidia(nvidia, own)
    amd = [[path, *arguments] for name, arguments in ARGUMENTS if (path := find_program(name))]
    return Amd(amd) if amd else None
