"""Resolve what a launch runs: the strategy, the complete layout and the roles.

All three are optional in a cluster file; a launch has all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dtrain.environ import tpu
from dtrain.environ.placement import gpus_of_trainers
from dtrain.runtime.layout import Layout
from dtrain.runtime.layout_rules import MisfitError, contradictions, torch_limits, uneven_rounds
from dtrain.spec.choice import (
    Resolved,
    choose_tensorflow,
    choose_torch,
    default_roles,
    mixed,
    roles_as_yaml,
    without_gpus,
)
from dtrain.spec.layouts import batched, disagreements, sized
from dtrain.spec.machines import devices_sound, machines
from dtrain.spec.model import LAUNCH_ROLES, Host
from dtrain.spec.problems import Problems
from dtrain.spec.schema import Section
from dtrain.spec.strategies import STRATEGIES
from dtrain.wording import either


def resolve(document: Section, problems: Problems) -> Resolved:
    """Resolve the strategy, the layout and the roles; add to ``problems`` what prevents a launch.

    The result may be empty if the file already has problems.
    """
    cluster, job = document.section("cluster"), document.section("job")
    if not _readable(cluster, job):
        return Resolved()
    hosts = machines(cluster, cluster.get("hosts"))
    try:
        if job.get("framework") == "torch":
            return _torch(job, hosts, problems)
        if job.get("framework") != "tensorflow":
            layout = job.build("layout", Layout)
            return Resolved(job.get("strategy"), layout=layout)
        return _tensorflow(cluster, job, hosts)
    except MisfitError as misfit:
        _report([misfit], job, problems)
        return Resolved()


def _readable(cluster: Section, job: Section) -> bool:
    """Whether every key that the result depends on was read without a problem."""
    framework = job.get("framework")
    sections = [job.section(name) for name in ("layout", "training", "roles")]
    return (
        framework in STRATEGIES
        and job.sound("strategy", "layout", "training", "roles")
        and job.get("strategy", "none") in STRATEGIES[framework]
        and all(section.sound(*section.entries) for section in sections)
        and devices_sound(cluster)
        and cluster.sound("tpu")
        and bool(cluster.get("hosts"))
    )


def _torch(job: Section, hosts: Sequence[Host], problems: Problems) -> Resolved:
    name, reason = job.get("strategy"), ""
    given = job.section("layout").values if "layout" in job else None
    if name == "auto" or (name is None and given is not None):
        choice = choose_torch(given, hosts)
        name, reason = choice.strategy, choice.strategy_reason if name == "auto" else ""
    if name in (None, "none", "data_parallel") and given is None:
        return Resolved(name, reason)
    if name == "data_parallel":
        raise MisfitError(
            "layout",
            "the strategy data_parallel copies the model to every GPU of one process, so it has "
            "no layout",
            "remove layout, or use 'strategy: ddp'",
        )
    if given is None and name == "3d":
        raise MisfitError(
            "strategy",
            "the strategy 3d needs job.layout, which says how the model is split",
            "write one with `dtrain plan --model-size 7B FILE --output FILE`, with the size of "
            "your model",
        )
    if name != "none":
        _check_backend(name, hosts)
    if _report(disagreements(name, given or {}), job, problems):
        return Resolved()
    # With strategy none, the script may use its own schedules.
    by_torch = name != "none"
    if by_torch and (other := (given or {}).get("backend", "runtime")) != "runtime":
        raise MisfitError(
            "backend",
            f"the strategy {name} uses dtrain.runtime, but the layout is for {other}",
            f"use 'strategy: none' with a script that uses {other}, or plan for dtrain.runtime",
        )
    layout = sized(name, given or {}, [host.workers for host in hosts])
    _report(contradictions(layout), job, problems)
    _report(torch_limits(layout) if by_torch else (), job, problems)
    global_batch = job.section("training").get("global_batch")
    layout = batched(layout, given or {}, global_batch)
    _report(uneven_rounds(layout) if by_torch else (), job, problems)
    return Resolved(name, reason, layout=layout)


def _check_backend(strategy: str, hosts: Sequence[Host]) -> None:
    """Raise MisfitError if some ranks would use NCCL and others Gloo: they cannot communicate."""
    if any(host.gpus for host in hosts) and (lacking := without_gpus(hosts)):
        raise MisfitError(
            "strategy",
            f"the strategy {strategy} cannot mix ranks on GPUs and on CPUs, and {lacking}",
            "list only hosts with GPUs, or use 'strategy: none' with a script that can mix them",
        )


def _tensorflow(cluster: Section, job: Section, hosts: Sequence[Host]) -> Resolved:
    name, reason = job.get("strategy"), ""
    given = job.section("roles")
    roles: Mapping[str, int] = {role: given.get(role) for role in LAUNCH_ROLES if given.get(role)}
    if name == "auto":
        choice = choose_tensorflow(roles, hosts, cluster.get("tpu"))
        name, reason = choice.strategy, choice.strategy_reason
        roles = choice.roles or roles
    if name == "parameter_server" and not roles.get("ps"):
        raise MisfitError(
            "strategy",
            "the strategy parameter_server needs parameter servers",
            f"add them to job, e.g. '{roles_as_yaml(default_roles(hosts))}'",
        )
    if name in ("multi_worker_mirrored", "parameter_server"):
        _check_replicas(name, roles, hosts)
    if name == "tpu":
        _check_tpu(cluster, hosts)
    layout = job.build("layout", Layout)
    return Resolved(name, reason, roles, layout)


def _check_replicas(strategy: str, roles: Mapping[str, int], hosts: Sequence[Host]) -> None:
    """Raise MisfitError if workers differ in their GPUs: their collectives would not match.

    With parameter servers, workers have no collectives, but all workers with GPUs run one
    program. Workers without GPUs run it on their CPUs.
    """
    gpus = [len(host.gpus) for host in hosts]
    if any(gpus) and not all(gpus) and not roles:
        raise mixed(hosts, "the strategy multi_worker_mirrored needs equal workers")
    found = set(gpus_of_trainers(roles, gpus) if roles else gpus)
    one_on_each = {"worker": sum(gpus)}
    if strategy == "parameter_server":
        found -= {0}
        one_on_each = {"chief": 1, **one_on_each, "ps": roles["ps"]}
    if len(found) > 1:
        raise MisfitError(
            "strategy",
            f"the strategy {strategy} needs equal numbers of GPUs in all workers, but here "
            f"workers would have {either(map(str, sorted(found)), 'and')}",
            f"use '{roles_as_yaml(one_on_each)}' for one worker on each GPU",
        )


def _check_tpu(cluster: Section, hosts: Sequence[Host]) -> None:
    if any(host.workers > 1 for host in hosts):
        raise MisfitError(
            "strategy",
            "the strategy tpu runs one process, which uses all TPU chips",
            "set 'gpus: 0' in cluster, and remove slots",
        )
    if len(hosts) == 1:
        return
    topology = cluster.get("tpu")
    if topology is None:
        raise MisfitError(
            "strategy",
            f"the strategy tpu needs the topology of the slice that the {len(hosts)} hosts form",
            f"add its chips along each axis to cluster, e.g. 'tpu: {tpu.usual(len(hosts))}'",
        )
    try:
        tpu.bounds(topology, len(hosts))
    except ValueError as error:
        hint = "list all hosts of the slice, and its topology"
        raise MisfitError("strategy", str(error), hint) from None
    if numeric := [host.address for host in hosts if ":" in host.address]:
        raise MisfitError(
            "strategy",
            f"TensorFlow's TPU resolver cannot read the IPv6 address {numeric[0]}",
            "set IPv4 addresses or names for the hosts in cluster.overrides",
        )


def _report(misfits: Iterable[MisfitError], job: Section, problems: Problems) -> bool:
    """Add each misfit at the position of its key. Returns whether there was one."""
    found = False
    for misfit in misfits:
        found, key = True, misfit.key
        if key == "layout":
            place = job.key_place(key)
        elif key == "strategy":
            place = job.place(key)
        else:
            section = job.section("training" if key == "global_batch" else "layout")
            place = section.key_place(key) if misfit.unused else section.place(key)
        problems.add(misfit.message, place, misfit.hint)
    return found
