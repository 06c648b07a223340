"""Checks across keys of a cluster file.

Each check skips values that were not read correctly, so one mistake is reported once.
"""

from __future__ import annotations

from collections.abc import Iterable

from dtrain.hostlist import fold
from dtrain.spec.hosts import Named
from dtrain.spec.machines import devices_sound, machines, overrides
from dtrain.spec.notify_keys import check_notify
from dtrain.spec.placeholders import check_placeholders
from dtrain.spec.problems import Problems, nearest, shown
from dtrain.spec.program import check_container, check_per, check_program
from dtrain.spec.progress_line import MOST, NEEDS_STEP, TOO_MANY, numbers
from dtrain.spec.schema import Section
from dtrain.spec.strategies import STRATEGIES, Strategy
from dtrain.spec.variables import check_variables
from dtrain.wording import either


def check(document: Section, problems: Problems) -> None:
    """Report every contradiction between the keys of a cluster file."""
    cluster, job = document.section("cluster"), document.section("job")
    if "cluster" in document.values:
        _check_hosts(cluster, problems)
        _check_devices(cluster, problems)
    check_notify(document, problems)
    if "job" in document.values:
        check_program(job, problems)
        check_container(job, problems)
        check_per(cluster, job, problems)
        check_placeholders(cluster, job, problems)
        check_variables(cluster, job, problems)
        _check_strategy(cluster, job, problems)
        _check_roles(job, problems)
        _check_rendezvous(job, problems)
        _check_elastic(cluster, job, problems)
        _check_success_policy(job, problems)
        _check_progress(job.section("progress"), problems)


def _check_hosts(cluster: Section, problems: Problems) -> None:
    hosts = _once("host", cluster.get("hosts", ()), problems)
    spares = _once("spare", cluster.get("spares", ()), problems)
    for named in cluster.get("spares", ()):
        if named.name in hosts:
            problems.add(
                f"the spare {shown(named.name)} is also one of the hosts",
                named.place,
                "a spare replaces a host that fails; remove it from one of the lists",
            )
    # With ``nodes``, an engine chooses the hosts, and has no overrides.
    if "hosts" not in cluster.values or not cluster.sound("spares") or "nodes" in cluster:
        return
    known = {**hosts, **spares}
    # Settings may replace the hosts or spares. Overrides of the former ones stay in the file.
    fewer = problems.settings & {"cluster.hosts", "cluster.spares"}
    for named, settings in cluster.get("overrides", ()):
        unused = named.name not in known and (not fewer or problems.is_setting(named.place))
        if unused and not problems.full:
            close = nearest(named.name, known)
            problems.add(
                f"the host {shown(named.name)} is overridden, but is neither a host nor a spare",
                named.place,
                f"did you mean {shown(close)}?" if close else f"hosts: {_some(hosts)}",
            )
        for key in ("user", "port"):
            ssh = settings.section("ssh")
            if key in settings and key in ssh:
                problems.add(
                    f"cluster.overrides.{named.name} gives {key} twice",
                    settings.key_place(key),
                    f"keep this one, or ssh.{key} {problems.where(ssh.key_place(key))}",
                )


def _once(what: str, names: Iterable[Named], problems: Problems) -> dict[str, Named]:
    """The first of each name. Reports the others."""
    found: dict[str, Named] = {}
    for named in names:
        first = found.setdefault(named.name, named)
        if first is not named:
            message = f"the {what} {shown(named.name)} is listed twice"
            problems.add_repeated(message, named.place, first.place)
    return found


def _check_devices(cluster: Section, problems: Problems) -> None:
    """Check that each host has GPUs or slots, and that ``slots`` has an effect if it is given."""
    if not devices_sound(cluster):
        return
    own = overrides(cluster)
    undecided, cpu_hosts = [], 0
    for named in cluster.get("hosts"):
        settings = own.get(named.name, [])
        gpus = next(
            (one.get("gpus") for one in reversed([cluster, *settings]) if "gpus" in one), None
        )
        slots = [section for section in settings if "slots" in section]
        if gpus:
            for section in slots:
                problems.add(
                    f"slots has no effect on {named.name}, which has GPUs",
                    section.key_place("slots"),
                    "slots is for hosts without GPUs; remove it, or add 'gpus: 0'",
                )
            continue
        cpu_hosts += 1
        if gpus is None and not slots and "slots" not in cluster:
            undecided.append(named.name)
    if undecided:
        problems.add(
            "cluster.gpus is missing"
            if len(undecided) == len(cluster.get("hosts"))
            else f"these hosts have no gpus or slots: {_some(undecided)}",
            cluster.head,
            "set the number of GPUs of each host, e.g. 'gpus: 8'; with 'gpus: 0', workers use CPUs",
        )
    if "slots" in cluster and not cpu_hosts:
        problems.add(
            "cluster.slots has no effect, because every host has GPUs",
            cluster.key_place("slots"),
            "slots is for hosts without GPUs; remove it, or set 'gpus: 0'",
        )


def _check_strategy(cluster: Section, job: Section, problems: Problems) -> None:
    name, framework = job.get("strategy"), job.get("framework")
    if name is None or framework is None:
        return
    strategy = STRATEGIES[framework].get(name)
    if strategy is None:
        others = [other for other, known in STRATEGIES.items() if name in known]
        close = nearest(name, STRATEGIES[framework])
        hint = f"strategies of {framework}: {', '.join(STRATEGIES[framework])}"
        if others:
            hint = f"it is one of {others[0]}; {hint}"
        elif close:
            hint = f"did you mean {shown(close)}? {hint}"
        problems.add(f"{framework} has no strategy {shown(name)}", job.place("strategy"), hint)
        return
    _check_single_host(cluster, job, name, strategy, problems)
    if framework != "tensorflow" or strategy.processes == "role" or name in ("none", "auto"):
        return
    roles = job.section("roles")
    if roles.get("ps"):
        problems.add(
            f"the strategy {name} has no parameter servers",
            roles.key_place("ps"),
            "remove ps, or use 'strategy: parameter_server'",
        )


def _check_single_host(
    cluster: Section, job: Section, name: str, strategy: Strategy, problems: Problems
) -> None:
    if not strategy.single_host:
        return
    hosts = cluster.get("hosts", ())
    if len(hosts) > 1:
        problems.add(
            f"the strategy {name} {strategy.summary}, but there are {len(hosts)} hosts",
            job.place("strategy"),
            f"use 'strategy: {strategy.instead}', or keep one host",
        )
    elif "roles" in job:
        problems.add(
            f"the strategy {name} {strategy.summary}, so it has no roles",
            job.key_place("roles"),
            f"remove roles, or use 'strategy: {strategy.instead}'",
        )
    elif hosts and job.get("framework") == "tensorflow" and devices_sound(cluster):
        (host,) = machines(cluster, hosts)
        settings = [cluster, *overrides(cluster).get(host.name, [])]
        slots = [own for own in settings if "slots" in own]
        if slots and not host.gpus and host.workers > 1:
            problems.add(
                f"the strategy {name} {strategy.summary}, so it has one worker",
                slots[-1].key_place("slots"),
                f"remove slots, or use 'strategy: {strategy.instead}'",
            )


def _check_roles(job: Section, problems: Problems) -> None:
    if "roles" not in job or "framework" not in job.values:
        return
    if job.get("framework") != "tensorflow":
        problems.add(
            f"roles are for tensorflow; {job.get('framework')} has ranks instead",
            job.key_place("roles"),
            "remove roles: the number of workers follows from hosts and gpus",
        )
        return
    roles = job.section("roles")
    if "roles" not in job.values or not roles.sound("chief", "worker", "ps", "evaluator"):
        return
    missing = [role for role in ("chief", "worker") if not roles.get(role)]
    if roles.get("ps") and missing:
        problems.add(
            f"parameter servers need a {' and a '.join(missing)}",
            roles.key_place("ps"),
            f"add '{', '.join(f'{role}: 1' for role in missing)}' to roles",
        )
    elif len(missing) == 2:
        problems.add("no role trains", job.key_place("roles"), "add a worker, e.g. 'worker: 2'")


def _check_rendezvous(job: Section, problems: Problems) -> None:
    rendezvous = job.section("rendezvous")
    backend = rendezvous.get("backend")
    framework = job.get("framework")
    if backend in ("static", "c10d") and framework not in ("torch", None):
        instead = {"tensorflow": "TF_CONFIG", "jax": "JAX_COORDINATOR_ADDRESS"}
        problems.add(
            f"the rendezvous backend {backend} is for torch only",
            rendezvous.place("backend"),
            "remove it: workers find each other through "
            f"{instead.get(framework, 'MASTER_ADDR and MASTER_PORT')}",
        )
    if "port" in rendezvous and "ports" in rendezvous:
        problems.add(
            "port and ports exclude each other",
            rendezvous.key_place("ports"),
            "remove ports to use a fixed port, or remove port to let each launch choose a free one",
        )
    strategy = STRATEGIES["torch"].get(job.get("strategy", ""))
    if backend in ("static", "c10d") and strategy and strategy.processes == "host":
        problems.add(
            f"the strategy {job.get('strategy')} runs in one process, without torchrun",
            rendezvous.place("backend"),
            "remove backend, or use 'strategy: ddp'",
        )


def _check_elastic(cluster: Section, job: Section, problems: Problems) -> None:
    if "elastic" not in job:
        return
    restart = job.section("restart")
    if job.sound("restart") and restart.sound("max") and not restart.get("max"):
        problems.add(
            "elastic has no effect without restart: a job continues on fewer hosts by restarting",
            job.key_place("elastic"),
            "add 'restart: {max: 3}' to job, or remove elastic",
        )
    elastic, hosts = job.section("elastic"), cluster.get("hosts", ())
    if hosts and elastic.get("min_hosts", 0) > len(hosts):
        problems.add(
            f"min_hosts is {elastic.get('min_hosts')}, but there "
            f"{'is one host' if len(hosts) == 1 else f'are {len(hosts)} hosts'}",
            elastic.place("min_hosts"),
            "set it to the fewest hosts on which the job should continue",
        )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return fold(listed[:200])[:80] if len(listed) > 1 else either(listed)


def _check_success_policy(job: Section, problems: Problems) -> None:
    first = job.get("success_policy") == "first_host"
    if first and job.get("framework") == "tensorflow":
        problems.add(
            "success_policy: first_host is not for tensorflow, whose tasks have roles",
            job.place("success_policy"),
            "remove it: ps and evaluator tasks, and the workers of parameter servers, end with the"
            " other tasks",
        )


def _check_progress(progress: Section, problems: Problems) -> None:
    lines = progress.get("line", ())
    found = numbers(lines)
    if lines and "step" not in found:
        problems.add(f"job.progress.line {NEEDS_STEP}", progress.place("line"))
    if len(found) > MOST:
        problems.add(f"job.progress.line {TOO_MANY}", progress.place("line"))
