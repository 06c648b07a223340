"""Warnings about settings that work, but badly, each with a better setting.

They do not prevent a launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from dtrain.environ.placement import place_tasks
from dtrain.runtime.layout import Layout
from dtrain.spec.choice import Resolved
from dtrain.spec.model import Cluster, Host
from dtrain.spec.problems import Problems, TextSpan, shown
from dtrain.spec.schema import Section
from dtrain.wording import counted, either

NVLINK = 300
"""GB/s each way of an A100's NVLink."""
RACKS = ("gb200", "gb300", "rubin", "mi455x")
"""GPUs whose link joins the hosts of a rack."""
RACK_NAMES = (*RACKS, "r200")
"""Parts of all their names: R200 and VR200 are Rubin."""


def advise(
    resolved: Resolved, cluster: Section, job: Section, values: Cluster, warnings: Problems
) -> None:
    """Add all warnings about a valid launch."""
    if "roles" in job:
        _advise_on_roles(resolved.roles, job, values.hosts, warnings)
    layout = resolved.layout
    if layout is None or job.get("framework") != "torch":
        return
    gbps = cluster.section("network").get("gbps")
    _advise_on_groups(layout, job, values.hosts, gbps, warnings)
    _advise_on_spares(cluster, values, warnings)
    if layout.pipeline > 1:
        _advise_on_pipeline(layout, job, warnings)


def _advise_on_roles(
    roles: Mapping[str, int], job: Section, hosts: Sequence[Host], warnings: Problems
) -> None:
    """Warn about hosts without a task."""
    used = {host for _, _, host in place_tasks(roles, [len(host.gpus) for host in hosts])}
    if idle := len(hosts) - len(used):
        get = "get" if idle > 1 else "gets"
        warnings.add(
            f"{idle} of the {len(hosts)} hosts {get} no task of job.roles",
            job.key_place("roles"),
            "raise the number of workers, or use fewer hosts",
        )


def _advise_on_groups(
    layout: Layout, job: Section, hosts: Sequence[Host], gbps: float | None, warnings: Problems
) -> None:
    """Warn about groups that communicate in every layer and cross hosts."""
    workers = sorted({host.workers for host in hosts})
    for key, group in _groups(layout):
        if _crosses_hosts(group, hosts) and _is_slow(hosts, gbps):
            warnings.add(
                f"{key}-parallel groups of {group} workers cross hosts, which have "
                f"{either(map(str, workers))} each: every layer waits for the network"
                f"{_compared(hosts, gbps)}",
                _place(key, job),
                f"keep {key} within a host, and put pipeline or data parallelism across hosts",
            )


def _advise_on_spares(cluster: Section, values: Cluster, warnings: Problems) -> None:
    """Warn about spares that cannot replace a host, because their number of workers differs."""
    workers = sorted({host.workers for host in values.hosts})
    for named, spare in zip(cluster.get("spares", ()), values.spares, strict=True):
        if spare.workers not in workers:
            warnings.add(
                f"the spare {shown(named.name)} has {spare.workers} workers, but hosts have "
                f"{either(map(str, workers))} each: it cannot replace a host in this layout",
                named.place,
                "list spares with the same number of gpus (or slots) as the hosts",
            )


def _groups(layout: Layout) -> Iterator[tuple[str, int]]:
    """Each kind of group that a host should hold, with the number of consecutive ranks that it
    spans: tensor ranks are innermost, then context ranks, then data ranks."""
    if layout.tensor > 1:
        yield "tensor", layout.tensor
    if layout.context > 1:
        yield "context", layout.tensor * layout.context
    # Megatron-LM sends each token to a host once: plans for it spread experts over hosts.
    if layout.expert > 1 and layout.backend != "megatron":
        yield "expert", layout.tensor * layout.expert


def _crosses_hosts(group: int, hosts: Sequence[Host]) -> bool:
    """Whether ``group`` consecutive ranks end on another host than they begin on."""
    if all(host.transport == "local" for host in hosts):
        return False
    *boundaries, _ = accumulate(host.workers for host in hosts)
    return any(boundary % group for boundary in boundaries)


def _is_slow(hosts: Sequence[Host], gbps: float | None) -> bool:
    """Whether a GPU reaches those of other hosts more slowly than by NVLink."""
    if all(any(name in (host.gpu or "").lower() for name in RACK_NAMES) for host in hosts):
        return False
    return gbps is None or _share(hosts, gbps) < NVLINK


def _share(hosts: Sequence[Host], gbps: float) -> float:
    """GB/s of the network for each GPU."""
    return gbps / 8 / max(host.workers for host in hosts)


def _compared(hosts: Sequence[Host], gbps: float | None) -> str:
    """Compares the network with NVLink; empty without GPUs."""
    if not all(host.gpus for host in hosts):
        return ""
    if gbps is None:
        return ", which is slower than NVLink"
    return f", {_share(hosts, gbps):.3g} GB/s per GPU; NVLink has {NVLINK} GB/s or more"


def _advise_on_pipeline(layout: Layout, job: Section, warnings: Problems) -> None:
    steps = layout.grad_accumulation
    if steps < layout.pipeline:
        runs = layout.schedule == "gpipe" or layout.backend != "runtime"
        refuses = "" if runs else "; dtrain.runtime needs more of them"
        smaller = "smaller micro-batches" if layout.micro_batch > 1 else "a larger global batch"
        warnings.add(
            f"with {counted(steps, 'micro-batch')} for {layout.pipeline} stages, each is "
            f"idle for {_bubble(layout):.0%} of a step{refuses}",
            _place("grad_accumulation", job),
            f"make grad_accumulation {2 * layout.pipeline} or more, with {smaller}",
        )
    if layout.sharding == "full" and layout.data > 1:
        warnings.add(
            "full sharding in a pipeline gathers all parameters again for every micro-batch",
            _place("sharding", job),
            "use 'sharding: optimizer' if the parameters of a stage fit on one GPU",
        )


def _bubble(layout: Layout) -> float:
    """Share of a step that a stage is idle (Narayanan et al., arXiv 2104.04473, section 2.2)."""
    idle = (layout.pipeline - 1) / layout.virtual_pipeline
    return idle / (layout.grad_accumulation + idle)


def _place(key: str, job: Section) -> TextSpan:
    """The position of a layout key, or of the key that implies it."""
    layout = job.section("layout")
    if key in layout:
        return layout.place(key)
    return job.place("strategy") if "strategy" in job else job.key_place("layout")
