"""``strategy: auto``: choose a strategy from the hosts, the roles and the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from dtrain.hostlist import fold
from dtrain.records import dataclass
from dtrain.runtime.layout import Layout
from dtrain.runtime.layout_rules import MisfitError
from dtrain.spec.layouts import Given, strategy_of
from dtrain.spec.model import Host
from dtrain.wording import plural


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a launch runs: values for the fields of `dtrain.spec.model.Job` with these names."""

    strategy: str | None = None
    strategy_reason: str = ""
    """Why it was chosen, as a clause."""
    roles: Mapping[str, int] = field(default_factory=dict)
    layout: Layout | None = None


def choose_torch(layout: Given | None, hosts: Sequence[Host]) -> Resolved:
    """``layout`` has the keys of ``job.layout`` in the file; None if the file has no layout."""
    if layout is not None:
        return Resolved(strategy_of(Layout(**layout)), "it matches job.layout")
    if sum(host.workers for host in hosts) == 1:
        return Resolved("ddp", "there is only one worker")
    return Resolved(
        "ddp",
        "without job.layout, the model has to fit on one GPU; for a larger model, write a layout "
        "with `dtrain plan --output`",
    )


def choose_tensorflow(roles: Mapping[str, int], hosts: Sequence[Host], tpu: str | None) -> Resolved:
    """``tpu`` is the topology in ``cluster.tpu``. Raises MisfitError if the user has to choose."""
    gpus = [len(host.gpus) for host in hosts]
    if roles.get("ps"):
        return Resolved("parameter_server", "job.roles has parameter servers")
    if roles:
        return Resolved("multi_worker_mirrored", "job.roles has workers and no parameter servers")
    if tpu is not None:
        return Resolved("tpu", f"the hosts form a TPU slice of {tpu} (cluster.tpu)")
    if len(hosts) == 1:
        return _choose_for_one(hosts[0])
    if len(set(gpus)) == 1:
        return Resolved(
            "multi_worker_mirrored",
            f"there are {len(hosts)} hosts with {gpus[0] or 'no'} {plural(gpus[0], 'GPU')} each",
        )
    if all(gpus):
        return Resolved(
            "multi_worker_mirrored",
            "hosts differ in their numbers of GPUs, and workers need equal numbers, so each GPU "
            "gets its own worker",
            {"worker": sum(gpus)},
        )
    raise mixed(hosts, "strategy auto cannot choose")


def _choose_for_one(host: Host) -> Resolved:
    if len(host.gpus) > 1:
        return Resolved("mirrored", f"there is one host, with {len(host.gpus)} GPUs")
    if host.workers > 1:
        return Resolved("multi_worker_mirrored", f"there is one host, with {host.workers} workers")
    return Resolved("one_device", f"there is one host, with {'one' if host.gpus else 'no'} GPU")


def mixed(hosts: Sequence[Host], consequence: str) -> MisfitError:
    """The error for hosts with and hosts without GPUs under a synchronous strategy.

    dtrain does not fall back to parameter servers: they train asynchronously, which changes the
    results, and need a script that is written for them.
    """
    return MisfitError(
        "strategy",
        f"{consequence}: {without_gpus(hosts)}, and synchronous training would wait for the CPUs",
        f"list only hosts with GPUs, or use 'strategy: parameter_server' with "
        f"'{roles_as_yaml(default_roles(hosts))}'",
    )


def without_gpus(hosts: Sequence[Host]) -> str:
    """The hosts without GPUs, as a clause; empty if all hosts have GPUs."""
    names = [host.name for host in hosts if not host.gpus]
    if not names:
        return ""
    return f"{fold(names)[:80]} {'has' if len(names) == 1 else 'have'} no GPUs"


def default_roles(hosts: Sequence[Host]) -> dict[str, int]:
    """Roles for parameter-server training on these hosts.

    A worker runs on each host with GPUs, and servers run on the other hosts. If all hosts have
    GPUs, or none has, a worker runs on each host, with one server for every two workers. If hosts
    differ in their numbers of GPUs, each GPU gets a worker, because workers need equal numbers.
    """
    gpus = [len(host.gpus) for host in hosts if host.gpus]
    training = len(gpus) or len(hosts)
    workers = sum(gpus) if len(set(gpus)) > 1 else training
    servers = len(hosts) - training or max(1, training // 2)
    return {"chief": 1, "worker": workers, "ps": min(servers, workers)}


def roles_as_yaml(roles: Mapping[str, int]) -> str:
    """Roles as a line of a cluster file."""
    return f"roles: {{{', '.join(f'{role}: {count}' for role, count in roles.items())}}}"
