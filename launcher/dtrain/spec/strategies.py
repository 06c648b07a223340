"""The strategies of each framework, with what a launch needs to know about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from dtrain.records import dataclass
from dtrain.spec.model import Framework


@dataclass(frozen=True, slots=True)
class Strategy:
    """One training strategy. `dtrain help strategies` describes each."""

    processes: Literal["device", "host", "role"]
    """Whether each GPU (or slot), each host or each task of ``job.roles`` gets a process."""
    summary: str = ""
    """What a strategy within one process on one host does: completes "this strategy …"."""
    instead: str = ""
    """The strategy to use for several hosts in its place."""

    @property
    def single_host(self) -> bool:
        return bool(self.instead)


_DEVICE, _HOST = Strategy("device"), Strategy("host")

STRATEGIES: Mapping[Framework, Mapping[str, Strategy]] = {
    "torch": {
        "none": _DEVICE,
        "auto": _DEVICE,
        "data_parallel": Strategy("host", "copies the model to every GPU of one process", "ddp"),
        **dict.fromkeys(("ddp", "fsdp", "hsdp", "tensor", "pipeline", "3d"), _DEVICE),
    },
    "tensorflow": {
        "none": _HOST,
        "auto": _HOST,
        "one_device": Strategy("host", "trains on one device", "multi_worker_mirrored"),
        "mirrored": Strategy(
            "host", "copies the model to every GPU of one host", "multi_worker_mirrored"
        ),
        "central_storage": Strategy(
            "host",
            "keeps variables on one device and computes on all GPUs of one host",
            "parameter_server",
        ),
        "multi_worker_mirrored": _HOST,
        "parameter_server": Strategy("role"),
        "tpu": _HOST,
        "model_parallel": _HOST,
    },
    "jax": {"none": _DEVICE},
    "none": {"none": _DEVICE},
}
