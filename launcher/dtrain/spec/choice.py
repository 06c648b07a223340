"""``strategy: auto``: the strategy that the hosts, the roles and the layout ask for, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dtrain.hostlist import fold
from dtrain.runtime.layout import Layout
from dtrain.runtime.layout_rules import MisfitError
from dtrain.spec.layouts import Given, strategy_of
from dtrain.spec.model import Host


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    strategy: str
    reason: str
    """Why, as a clause."""
    roles: Mapping[str, int] = field(default_factory=dict)
    """TensorFlow tasks, where they are part of the choice."""


def choose_torch(layout: Given | None, hosts: Sequence[Host]) -> StrategyChoice:
    """``layout`` is what the file gives of ``job.layout``, None where there is none."""
    if layout is not None:
        return StrategyChoice(strategy_of(Layout(**layout)), "it is what job.layout describes")
    if sum(host.workers for host in hosts) == 1:
        return StrategyChoice("ddp", "there is one worker, and nothing to split over")
    return StrategyChoice(
        "ddp",
        "nothing says that the model does not fit on one GPU; `dtrain plan --output` writes a "
        "layout for one that does not",
    )


def choose_tensorflow(
    roles: Mapping[str, int], hosts: Sequence[Host], tpu: str | None = None
) -> StrategyChoice:
    """``tpu`` is the topology in ``cluster.tpu``. Raises MisfitError where only a person can
    choose."""
    gpus = [len(host.gpus) for host in hosts]
    if roles.get("ps"):
        return StrategyChoice("parameter_server", "job.roles has parameter servers")
    if roles:
        return StrategyChoice(
            "multi_worker_mirrored", "job.roles has workers and no parameter servers"
        )
    if tpu is not None:
        return StrategyChoice("tpu", f"the hosts make up a TPU slice of {tpu} (cluster.tpu)")
    if len(hosts) == 1:
        return _choose_for_one(hosts[0])
    if len(set(gpus)) == 1:
        return StrategyChoice(
            "multi_worker_mirrored",
            f"there are {len(hosts)} hosts with {gpus[0] or 'no'} GPU{'s' * (gpus[0] != 1)} each",
        )
    if all(gpus):
        return StrategyChoice(
            "multi_worker_mirrored",
            "hosts differ in their GPUs, so that each GPU has a worker of its own: workers need "
            "as many replicas as each other",
            {"worker": sum(gpus)},
        )
    raise mixed(hosts, "strategy auto cannot choose")


def _choose_for_one(host: Host) -> StrategyChoice:
    if len(host.gpus) > 1:
        return StrategyChoice("mirrored", f"there is one host, with {len(host.gpus)} GPUs")
    if host.workers > 1:
        return StrategyChoice(
            "multi_worker_mirrored", f"there is one host, with {host.workers} workers"
        )
    return StrategyChoice(
        "one_device", f"there is one host, with {'one' if host.gpus else 'no'} GPU"
    )


def mixed(hosts: Sequence[Host], consequence: str) -> MisfitError:
    """For hosts with and without GPUs, where every worker would have to do the same share.

    Nothing falls back on parameter servers by itself: they train asynchronously, which is another
    training, and take a script that is written for them.
    """
    return MisfitError(
        "strategy",
        f"{consequence}: {without_gpus(hosts)}, and synchronous training would wait for CPUs",
        f"list hosts with GPUs alone, or use 'strategy: parameter_server' with "
        f"'{written(usual_roles(hosts))}'",
    )


def without_gpus(hosts: Sequence[Host]) -> str:
    """The hosts that have none, as a clause; empty where all have some."""
    names = [host.name for host in hosts if not host.gpus]
    if not names:
        return ""
    return f"{fold(names)[:80]} {'has' if len(names) == 1 else 'have'} no GPUs"


def usual_roles(hosts: Sequence[Host]) -> dict[str, int]:
    """Parameter-server roles for these hosts: a worker on each host with GPUs, and servers on
    the others; where all hosts are alike, a worker on each and a server for every two. Where
    hosts differ in their GPUs, each GPU has a worker: workers need as many as each other."""
    gpus = [len(host.gpus) for host in hosts if host.gpus]
    training = len(gpus) or len(hosts)
    workers = sum(gpus) if len(set(gpus)) > 1 else training
    servers = len(hosts) - training or max(1, training // 2)
    return {"chief": 1, "worker": workers, "ps": min(servers, workers)}


def written(roles: Mapping[str, int]) -> str:
    """As in a cluster file."""
    return f"roles: {{{', '.join(f'{role}: {count}' for role, count in roles.items())}}}"
