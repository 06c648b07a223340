"""The GPUs that a process sees and the network interface that it uses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


def visible_devices(gpus: Sequence[int]) -> dict[str, str]:
    """The variable that selects GPUs for CUDA and ROCm; an empty list hides all GPUs."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in gpus)}


def chosen_gpus(environment: Mapping[str, str], local_rank: int | None = None) -> tuple[int, ...]:
    """The GPUs of a process that sees ``environment``: all visible ones, or only that of its
    ``local_rank``. Empty if the environment names GPUs in another way than by index."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    other = {"HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"} & environment.keys()
    if other or not all(re.fullmatch("[0-9]{1,4}", gpu) for gpu in visible):
        return ()
    gpus = tuple(map(int, visible))
    if local_rank is None or len(gpus) == 1:
        return gpus
    return gpus[local_rank : local_rank + 1]


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
