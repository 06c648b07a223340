"""The strategies of each framework, with what a launch needs to know about them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from dtrain.records import dataclass
from dtrain.spec.model import Framework


@dataclass(frozen=True, slots=True)
class Strategy:
    """One training strategy. ``summary`` completes "this strategy …"."""

    processes: Literal["device", "host", "role"]
    """Whether each GPU (or slot), each host or each task of ``job.roles`` gets a process."""
    summary: str
    instead: str = ""
    """The strategy to use for several hosts, if this one works within one process on one host."""

    @property
    def single_host(self) -> bool:
        return bool(self.instead)


_TORCH = {
    "none": Strategy("device", "leaves everything to the script"),
    "auto": Strategy("device", "lets dtrain choose"),
    "data_parallel": Strategy("host", "copies the model to every GPU of one process", "ddp"),
    "ddp": Strategy("device", "copies the model to every GPU and averages gradients"),
    "fsdp": Strategy("device", "shards parameters, gradients and optimizer over all GPUs"),
    "hsdp": Strategy("device", "shards within groups of GPUs and copies between groups"),
    "tensor": Strategy("device", "splits every layer over GPUs"),
    "pipeline": Strategy("device", "puts consecutive layers on different GPUs"),
    "3d": Strategy("device", "combines tensor, pipeline and data parallelism as in job.layout"),
}

_TENSORFLOW = {
    "none": Strategy("host", "leaves everything to the script"),
    "auto": Strategy("host", "lets dtrain choose"),
    "one_device": Strategy("host", "trains on one device", "multi_worker_mirrored"),
    "mirrored": Strategy(
        "host", "copies the model to every GPU of one host", "multi_worker_mirrored"
    ),
    "central_storage": Strategy(
        "host",
        "keeps variables on one device and computes on all GPUs of one host",
        "parameter_server",
    ),
    "multi_worker_mirrored": Strategy("host", "copies the model to every GPU of every host"),
    "parameter_server": Strategy("role", "keeps variables on parameter servers (job.roles)"),
    "tpu": Strategy("host", "trains on a TPU slice from its first host (not tried on TPUs)"),
    "model_parallel": Strategy("host", "shards the model over devices"),
}

_OTHER = {"none": Strategy("device", "leaves everything to the script")}

STRATEGIES: Mapping[Framework, Mapping[str, Strategy]] = MappingProxyType(
    {
        "torch": MappingProxyType(_TORCH),
        "tensorflow": MappingProxyType(_TENSORFLOW),
        "jax": MappingProxyType(_OTHER),
        "none": MappingProxyType(_OTHER),
    }
)
