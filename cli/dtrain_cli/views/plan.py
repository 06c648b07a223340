"""A launch plan as text and as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping

from dtrain import hostlist
from dtrain.launchplan.document import completed_by_node, document, masked
from dtrain.launchplan.environment import NodeVariable
from dtrain.launchplan.plan import HostPlan, LaunchPlan, Process


def as_json(plan: LaunchPlan, files: Mapping[str, str]) -> str:
    """Return one JSON object; see `dtrain.launchplan.document`. ``files`` is the batch script of an
    engine that needs one, by its name."""
    content = document(plan)
    if files:
        content["files"] = dict(files)
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def as_text(plan: LaunchPlan) -> str:
    """Return what a launch executes: first the part shared by all hosts, then each host's part."""
    environments = [_environment(plan, part) for part in plan.hosts]
    first, *others = environments
    shared = [line for line in first if all(line in other for other in others)]
    lines = [*_summary(plan)]
    if shared:
        lines += ["every process", *(f"  {line}" for line in shared)]
    for part, environment in zip(plan.hosts, environments, strict=True):
        lines += _host(part, [line for line in environment if line not in shared])
    return "\n".join(lines) + "\n"


def _summary(plan: LaunchPlan) -> Iterator[str]:
    job = plan.job
    hosts = hostlist.fold(plan.host_names)
    count = len(plan.hosts)
    how = f"torch, {job.rendezvous.backend}" if job.framework == "torch" else job.framework
    strategy = f", {job.strategy}" if job.strategy else ""
    processes = f"{plan.world_size} process" + ("es" if plan.world_size != 1 else "")
    yield f"{plan.name}: {processes} on {count} host{'s' * (count != 1)} {hosts} ({how}{strategy})"
    if job.strategy_reason:
        yield f"strategy  {job.strategy} (auto): {job.strategy_reason}"
    if job.sync is not None:
        yield f"sync      {_inline(job.sync.source)} to each host"
    if job.container is not None:
        yield f"container {_inline(job.container.image)} ({job.container.engine})"
    for line in job.setup:
        yield f"setup     {_inline(line)}"
    if any(process.bound_to_gpus for part in plan.hosts for process in part.processes):
        yield "binding   each process to the NUMA node of its GPUs, if they share one"


def _environment(plan: LaunchPlan, part: HostPlan) -> list[str]:
    """A host's variables, one per line."""
    lines = [_assignment(*item) for item in masked(part.environment, plan).items()]
    return lines + _completed(part.node_variables)


def _completed(variables: Mapping[str, NodeVariable]) -> list[str]:
    """Variables whose values only the node knows, in shell syntax."""
    return [
        f"{name}: {value}" if variables[name].kind == "interface" else f"{name}={value}"
        for name, value in completed_by_node(variables).items()
    ]


def _host(part: HostPlan, environment: list[str]) -> Iterator[str]:
    yield ""
    yield f"{part.host.name}  address {part.host.address}  node rank {part.node_rank}"
    yield f"  in {_inline(part.workdir)}"
    yield from (f"  {line}" for line in environment)
    yield from _processes(part)


def _processes(part: HostPlan) -> Iterator[str]:
    """Each process on a line, without the words for its container. A command that all processes
    share comes once, above them."""
    commands = {process.argv for process in part.processes}
    if len(commands) == 1:
        yield f"  {_inline(shlex.join(commands.pop()))}"
        commands = set()
    for process in part.processes:
        yield f"    {_process(process, with_command=bool(commands))}"


def _process(process: Process, *, with_command: bool) -> str:
    words = [f"{process.role} {process.index}"]
    words += [_assignment(*item) for item in process.environment.items()]
    words += _completed(process.node_variables)
    if with_command:
        words.append(_inline(shlex.join(process.argv)))
    return "  ".join(words)


def _assignment(name: str, value: str) -> str:
    return f"{name}={_inline(shlex.quote(value)) if value else ''}"


def _inline(text: str) -> str:
    """``text`` on one line, with control characters escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
