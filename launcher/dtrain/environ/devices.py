"""The GPUs that a process sees and the network interface that it uses."""

from __future__ import annotations

from collections.abc import Sequence


def visible_devices(gpus: Sequence[int]) -> dict[str, str]:
    """The variable that selects GPUs for CUDA and ROCm; an empty list hides all GPUs."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in gpus)}


def network_interface(interface: str | None) -> dict[str, str]:
    """The interface for NCCL, Gloo and torch RPC (TensorPipe); with ``None``, each chooses."""
    if interface is None:
        return {}
    return {f"{library}_SOCKET_IFNAME": interface for library in ("NCCL", "GLOO", "TP")}


def split(gpus: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """``gpus`` in ``parts`` slices whose lengths differ by at most one, longer ones first."""
    size, extra = divmod(len(gpus), parts)
    runs, start = [], 0
    for part in range(parts):
        end = start + size + (part < extra)
        runs.append(tuple(gpus[start:end]))
        start = end
    return runs
