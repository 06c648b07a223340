"""Which GPUs a process sees and which network interface it uses."""

from __future__ import annotations

from collections.abc import Sequence


def visible_devices(gpus: Sequence[int]) -> dict[str, str]:
    """CUDA's (and ROCm's) choice of GPUs; an empty list hides them all."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in gpus)}


def network_interface(interface: str | None) -> dict[str, str]:
    """The interface for the connections of NCCL, gloo and torch RPC (TensorPipe); ``None`` leaves
    them to choose."""
    if interface is None:
        return {}
    return {f"{library}_SOCKET_IFNAME": interface for library in ("NCCL", "GLOO", "TP")}


def split(gpus: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """``gpus`` in ``parts`` runs whose lengths differ by one at most, the longer ones first."""
    size, extra = divmod(len(gpus), parts)
    runs, start = [], 0
    for part in range(parts):
        end = start + size + (part < extra)
        runs.append(tuple(gpus[start:end]))
        start = end
    return runs
