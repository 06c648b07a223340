"""The GPUs that a process sees and the network interface that it uses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dtrain.environ.template import Slot, Template, joined


def visible_devices(gpus: Sequence[int], *, scripted: bool) -> dict[str, str]:
    """The variable that selects GPUs for CUDA and ROCm; an empty list hides all GPUs. In a script,
    they are elements of the array ``dtrain_gpus``: the GPUs that the job gets on its node."""
    names = [
        Template(Slot(str(gpu), f"${{dtrain_gpus[{gpu}]}}")) if scripted else str(gpu)
        for gpu in gpus
    ]
    return {"CUDA_VISIBLE_DEVICES": joined(",", names) if names else ""}


def chosen_gpus(environment: Mapping[str, str], local_rank: int | None) -> tuple[int, ...]:
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
