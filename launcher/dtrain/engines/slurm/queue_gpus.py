"""The GPUs of a partition, for the planner. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from dtrain.diagnostics import UsageError
from dtrain.engines.slurm.partitions import Partition, chosen
from dtrain.planning.request import QueueGpus
from dtrain.spec.model import Slurm


def gpus_of(partitions: Iterable[Partition], slurm: Slurm) -> QueueGpus:
    """The GPUs that a job with these keys gets. Raises UsageError if there is no such partition."""
    possible = chosen(partitions, slurm.partition)
    if not possible:
        raise UsageError(
            f"there is no partition {slurm.partition}"
            if slurm.partition
            else "the cluster has no default partition",
            hint="`sinfo` lists the partitions; set cluster.slurm.partition",
        )
    first = possible[0]
    types = [kind for kind in first.gpu_types if kind]
    if slurm.gpu_type is not None:
        types = [kind for kind in types if kind.lower() == slurm.gpu_type.lower()]
        types = types or [slurm.gpu_type]
    most = max((machine.count(slurm.gpu_type) for machine in first.machines), default=0)
    return QueueGpus(first.name, tuple(types), most)
