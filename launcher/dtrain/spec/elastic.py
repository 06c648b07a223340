"""A job that continues on fewer hosts (``job.elastic``).

The number of data ranks shrinks. The model split (tensor, pipeline, context and expert
parallelism, and the groups of hybrid sharding) stays the same, so no rank needs more memory for
it. If the remaining data ranks can share the global batch, it stays the same too: ranks accumulate
more gradients, and the loss curve continues.

With TensorFlow, the workers of the lost hosts are removed. A chief, parameter servers and an
evaluator move to the remaining hosts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import lcm

from dtrain.environ.placement import gpus_of_trainers, place_tasks, trains
from dtrain.runtime.layout import Layout, Training
from dtrain.runtime.layout_rules import MisfitError
from dtrain.spec.model import ClusterFile, Host, Job
from dtrain.spec.problems import Problems
from dtrain.spec.schema import Section


def without(spec: ClusterFile, lost: Collection[str]) -> ClusterFile:
    """The job on the remaining hosts, or on as many of them as its layout can use.

    Raises MisfitError if it can use fewer than ``job.elastic.min_hosts``.
    """
    left = [host for host in spec.cluster.hosts if host.name not in lost]
    if spec.job.framework == "tensorflow":
        job = _tensorflow(spec, lost, left)
    elif spec.job.layout is not None:
        least = spec.job.elastic.min_hosts if spec.job.elastic is not None else 1
        left = left[: _usable(spec.job.layout, left, least)]
        job = _torch(spec.job, spec.job.layout, sum(host.workers for host in left))
    else:
        job = spec.job
    return replace(spec, cluster=replace(spec.cluster, hosts=tuple(left)), job=job)


def differences(before: ClusterFile, after: ClusterFile) -> Iterator[str]:
    """How the job shrinks, as phrases such as "data 6 instead of 8"."""
    was, now = _sizes(before.job), _sizes(after.job)
    for name, size in now.items():
        if size != was[name]:
            yield f"{name} {size} instead of {was[name]}"


def check_elastic(spec: ClusterFile, given: Section, problems: Problems) -> None:
    """Report a job that cannot lose any of its hosts; ``given`` is ``job.elastic``."""
    hosts, elastic = spec.cluster.hosts, spec.job.elastic
    if elastic is None or elastic.min_hosts >= len(hosts):
        return
    misfits = []
    for name in {host.workers: host.name for host in hosts}.values():
        try:
            without(spec, {name})
        except MisfitError as misfit:
            misfits.append(misfit)
        else:
            return
    problems.add(
        f"the job cannot lose any host: {misfits[0].message}",
        given.place("min_hosts"),
        misfits[0].hint,
    )


def _usable(layout: Layout, hosts: Sequence[Host], least: int) -> int:
    """How many of ``hosts``, counted from the first, the layout can use."""
    shard = layout.shard or 1
    # Optimizer states and experts are sharded over context and data ranks together.
    unit = layout.tensor * layout.pipeline * lcm(layout.context, shard, layout.expert)
    worlds = [*accumulate(host.workers for host in hosts)]
    usable = [count for count, world in enumerate(worlds, 1) if world % unit == 0]
    if usable and usable[-1] >= least:
        return usable[-1]
    keys = ("tensor", "pipeline", "context", "expert", *(["shard"] if layout.shard else []))
    parts = ", ".join(layout.product([key]) for key in layout.split_by(keys))
    raise MisfitError(
        "layout",
        f"the layout ({parts}) needs a multiple of {unit} workers; the {len(hosts)} remaining "
        f"hosts have {worlds[-1]}, and job.elastic.min_hosts is {least}",
        f"set min_hosts to {usable[-1]} or less"
        if usable
        else "list cluster.spares to replace lost hosts, and remove elastic",
    )


def _torch(job: Job, layout: Layout, world: int) -> Job:
    data = world // (layout.tensor * layout.pipeline * layout.context)
    layout = _shared(layout, data)
    if layout.sharding != "none" and layout.copies == 1:
        layout = replace(layout, sharding="none", shard=None)
    return replace(job, layout=layout, training=_with_batch(job.training, layout.global_batch))


def _shared(layout: Layout, data: int) -> Layout:
    """The layout over ``data`` ranks, with the same global batch and micro-batches of at most the
    same size. If the batch is not divisible, the nearest batch that is."""
    rounds = layout.round_size
    share, rest = divmod(layout.global_batch, data)
    for size in range(layout.micro_batch, 0, -1) if not rest else ():
        if share % (size * rounds) == 0:
            return replace(layout, data=data, micro_batch=size, grad_accumulation=share // size)
    nearest = max(1, round(layout.global_batch / (data * layout.micro_batch * rounds)))
    return replace(layout, data=data, grad_accumulation=nearest * rounds)


def _with_batch(training: Training | None, batch: int) -> Training | None:
    """Without a global batch in the file, the script chooses it, so nothing changes."""
    if training is None or training.global_batch is None:
        return training
    return replace(training, global_batch=batch)


def _tensorflow(spec: ClusterFile, lost: Collection[str], left: Sequence[Host]) -> Job:
    job = spec.job
    if job.strategy == "tpu":
        raise MisfitError("strategy", "a TPU slice needs all of its hosts", "remove elastic")
    roles = _roles(job.roles, spec.cluster.hosts, lost)
    batch = job.training.global_batch if job.training is not None else None
    if job.strategy == "multi_worker_mirrored" and batch is not None:
        replicas = _replicas(roles, left)
        if batch % replicas and batch % _replicas(job.roles, spec.cluster.hosts) == 0:
            batch = max(1, round(batch / replicas)) * replicas
        return replace(job, roles=roles, training=_with_batch(job.training, batch))
    return replace(job, roles=roles)


def _roles(
    roles: Mapping[str, int], hosts: Sequence[Host], lost: Collection[str]
) -> Mapping[str, int]:
    """The roles without the tasks that trained on the lost hosts."""
    if not roles:
        return roles
    placed = place_tasks(roles, [len(host.gpus) for host in hosts])
    gone = sum(trains(role, roles) and hosts[on].name in lost for role, _, on in placed)
    # Parameter servers and their chief only serve workers.
    least = 0 if roles.get("chief") and not roles.get("ps") else 1
    workers = max(least, roles.get("worker", 0) - gone)
    return {role: count for role, count in {**roles, "worker": workers}.items() if count}


def _replicas(roles: Mapping[str, int], hosts: Sequence[Host]) -> int:
    if not roles:
        return sum(host.workers for host in hosts)
    return sum(max(1, gpus) for gpus in gpus_of_trainers(roles, [len(host.gpus) for host in hosts]))


def _sizes(job: Job) -> dict[str, object]:
    layout, training = job.layout or Layout(), job.training or Training()
    return {
        "data": layout.data,
        "sharding": layout.sharding,
        "micro_batch": layout.micro_batch,
        "workers": job.roles.get("worker", 0),
        "global batch": training.global_batch,
    }
