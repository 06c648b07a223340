"""A launch plan as text and as JSON."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from dtrain import hostlist
from dtrain.launchplan.document import completed_by_node, document, masked
from dtrain.launchplan.environment import NodeVariable
from dtrain.launchplan.plan import HostPlan, LaunchPlan, Process
from dtrain.spec.problems import visible
from dtrain.wording import counted
from dtrain_cli.views import names

_NUMBER = re.compile(r"\d{1,18}")  # `int` refuses thousands of digits
_NAMED = "  DTRAIN_HOST="


def as_json(plan: LaunchPlan, files: Mapping[str, str]) -> str:
    """Return one JSON object; see `dtrain.launchplan.document`. ``files`` is the batch script of an
    engine that needs one, by its name."""
    content = document(plan)
    if files:
        content["files"] = dict(files)
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def as_text(plan: LaunchPlan) -> str:
    """Return what a launch executes: first the part shared by all hosts, then each host's part.

    Of hosts whose parts differ only by names and by numbers that count on, it has the first and the
    last.
    """
    environments = [_environment(plan, part) for part in plan.hosts]
    first, *others = environments
    shared = [line for line in first if all(line in other for other in others)]
    lines = [*_summary(plan)]
    if shared:
        lines += ["every process", *(f"  {line}" for line in shared)]
    own = [[line for line in environment if line not in shared] for environment in environments]
    blocks = [[*_host(*both)] for both in zip(plan.hosts, own, strict=True)]
    for alike in _counted(blocks):
        lines += blocks[alike[0]]
        if len(alike) > 1:
            lines += [*_between(plan, alike), *blocks[alike[-1]]]
    return "\n".join(lines) + "\n"


def _summary(plan: LaunchPlan) -> Iterator[str]:
    job = plan.job
    hosts = hostlist.fold(plan.host_names)
    how = f"torch, {job.rendezvous.backend}" if job.framework == "torch" else job.framework
    strategy = f", {job.strategy}" if job.strategy else ""
    count = f"{counted(plan.world_size, 'process')} on {counted(len(plan.hosts), 'host')}"
    yield f"{plan.name}: {count} {hosts} ({how}{strategy})"
    if job.strategy_reason:
        yield f"strategy  {job.strategy} (auto): {job.strategy_reason}"
    if job.sync is not None:
        yield f"sync      {_inline(job.sync.source)} to each host"
    if job.container is not None:
        yield f"container {_inline(job.container.image)} ({job.container.engine})"
    for line in job.setup:
        yield f"setup     {_inline(line)}"
    processes = [process for part in plan.hosts for process in part.processes]
    services = [process.label for process in processes if process.service]
    if services:
        yield f"services  {names.workers(services)}: stopped when all others are done"
    if any(process.bound_to_gpus for process in processes):
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


def _counted(blocks: Sequence[list[str]]) -> Iterator[range]:
    """Single hosts, and sequences of at least four whose blocks, without names and addresses, have
    equal texts around numbers that grow by the same from each host to the next."""
    texts = [
        "\n".join(line for line in block[2:] if not line.startswith(_NAMED)) for block in blocks
    ]
    around = [_NUMBER.split(text) for text in texts]
    numbers = [[*map(int, _NUMBER.findall(text))] for text in texts]
    growth = [[], *([b - a for a, b in zip(*both, strict=False)] for both in pairwise(numbers))]
    begin = 0
    while begin < len(blocks):
        end = begin + 1
        while (
            end < len(blocks) and around[end] == around[begin] and growth[end] == growth[begin + 1]
        ):
            end += 1
        # The last hosts of a sequence that is too short may begin a longer one.
        end = end if end - begin > 3 else begin + 1
        yield range(begin, end)
        begin = end


def _between(plan: LaunchPlan, alike: range) -> Iterator[str]:
    """The hosts between the first and the last of a sequence."""
    hosts = plan.hosts[alike[1] : alike[-1]]
    names, addresses = (
        hostlist.fold([getattr(part.host, key) for part in hosts]) for key in ("name", "address")
    )
    yield ""
    yield f"{names}  address {addresses}  node rank {hosts[0].node_rank}-{hosts[-1].node_rank}"
    ends = [plan.hosts[place].host.name for place in (alike[0], alike[-1])]
    yield f"  like {ends[0]} and {ends[1]}, with the numbers in between"


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
    return "".join(map(visible, text))
