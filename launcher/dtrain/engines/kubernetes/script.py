"""The script of each pod, ``job.sh``: all processes of one host. Pure.

The script needs no dtrain in the image, only bash, GNU sed and the basic programs of Linux. A pod
knows its node rank from ``JOB_COMPLETION_INDEX``, and all addresses from the name of the JobSet.
Each process gets the environment of an SSH launch.

Kubernetes keeps one log for each container. So the script puts the name of the process in front of
each line, and adds lines about the end of each process, and about the TERM that a deletion sends.
It splits a long line into pieces: all streams share one pipe, in which longer writes of several
programs would mix. `dtrain.engines.kubernetes.lines` reads the lines and pieces.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from math import ceil
from pathlib import Path

from dtrain.engines.kubernetes.kinds import keys_of
from dtrain.launchplan.plan import LaunchPlan
from dtrain.launchplan.pods import object_name, pod_address
from dtrain.launchplan.programs import CODE
from dtrain.launchplan.script_file import fill
from dtrain.launchplan.shell import command, comment
from dtrain.launchplan.tasks import Task, exports, numbers, prepared, tasks_of, uniform
from dtrain.quoting import path, word

NAME = "job.sh"
SCRIPT = Path(__file__).with_name(NAME)
FOLDER = "/dtrain"
"""Folder in the container for the files of the run."""
RUN_FOLDER = f"{FOLDER}/run"
"""That of the attempt."""
FILES = "/etc/dtrain"
"""Folder in the container with this script, ``runtime.zip`` and ``code.tar.gz``."""
RUNTIME = "runtime.zip"
SYNCED = "code.tar.gz"
RESTARTS = "DTRAIN_RESTARTS"
"""Variable with the number of restarts so far."""
MARK = "[dtrain]"
"""In front of the script's own lines."""
BEGINS = f"{MARK} begins"
"""The first line of a log. A log without it has lost its first lines."""
ENDS = f"{MARK} ends"
"""The last line of a log that lacks none at its end."""
TERM = f"{MARK} TERM"
"""Before the processes get the TERM of a deletion."""


def render(plan: LaunchPlan) -> str:
    """The whole text of ``job.sh``. ``plan.kubernetes`` must be set."""
    tasks = tasks_of(plan)
    gaps = {
        "title": [f"# {comment(plan.name)}: all processes of one pod."],
        "values": _values(plan),
        "files": _files(plan),
        "environment": _environment(plan, tasks),
        "program": _program(plan, tasks),
        "deadline": [f"dtrain_deadline=$((SECONDS + {ceil(plan.job.grace) + 1}))"],
        "count": _count(plan),
        "numbers": _numbers(plan, tasks),
    }
    services = any(task.process.service for task in tasks)
    return fill(SCRIPT.read_text("utf-8"), {"services": services}, gaps)


def serving_pods(plan: LaunchPlan) -> tuple[int, ...]:
    """The node ranks of the pods that serve the others until they are done."""
    return tuple(
        part.node_rank
        for part in plan.hosts
        if part.processes and all(process.service for process in part.processes)
    )


def common_ports(plan: LaunchPlan) -> list[int]:
    """The ports on which every pod listens."""
    common = set.intersection(*({*part.ports} for part in plan.hosts))
    return sorted(port + _shift(plan) for port in common)


def _shift(plan: LaunchPlan) -> int:
    """The distance of the job's ports from the plan's."""
    rendezvous = plan.job.rendezvous
    if rendezvous.port is not None or not keys_of(plan).host_network:
        return 0
    # Another job may use the same machine.
    firsts = rendezvous.first_ports(max(len(part.ports) for part in plan.hosts))
    return zlib.crc32(object_name(plan.name, plan.run).encode()) % len(firsts)


def _values(plan: LaunchPlan) -> Iterator[str]:
    """What differs from pod to pod, and from one attempt to the next."""
    objects = object_name(plan.name, plan.run)
    yield f"dtrain_attempt=$((${{{RESTARTS}:-0}} + 1))"
    yield f"dtrain_run={word(plan.run or plan.name)}"
    if plan.job.rendezvous.port is None:
        yield f"dtrain_port={plan.job.rendezvous.first_port + _shift(plan)}"
    yield "dtrain_hosts=() dtrain_addresses=()"
    yield f"for ((dtrain_number = 0; dtrain_number < {len(plan.hosts)}; dtrain_number++)); do"
    yield '  dtrain_hosts+=("node$dtrain_number")'
    address = pod_address(objects, 0).replace("-0.", "-$dtrain_number.", 1)
    yield f'  dtrain_addresses+=("{address}")'
    yield "done"
    if gpus := len(plan.hosts[0].host.gpus):
        yield f"dtrain_gpus=({' '.join(map(str, range(gpus)))})"
    yield f"export DTRAIN_RUN_DIR={RUN_FOLDER}"


def _files(plan: LaunchPlan) -> Iterator[str]:
    if plan.run:
        yield f'ln -s {FILES}/{RUNTIME} "$DTRAIN_RUN_DIR" || exit # dtrain.runtime'
    if plan.job.sync is not None:
        folder = path(plan.hosts[0].workdir if plan.job.workdir else CODE)
        yield f"mkdir -p -- {folder} && tar -xzf {FILES}/{SYNCED} -C {folder} || exit"


def _environment(plan: LaunchPlan, tasks: list[Task]) -> Iterator[str]:
    """Lines that set the environment of a process."""
    common, own = exports(plan, tasks)
    yield from (*prepared(plan, tasks[0].part), *common)
    if not uniform(plan, tasks):
        yield from _case(tasks, ["; ".join(its) or ":" for its in own])


def _program(plan: LaunchPlan, tasks: list[Task]) -> Iterator[str]:
    programs = [f"exec {command(task.process)}" for task in tasks]
    if len(set(programs)) == 1 or uniform(plan, tasks):
        yield programs[0]
    else:
        yield from _case(tasks, programs)


def _count(plan: LaunchPlan) -> Iterator[str]:
    """Lines that count the processes of the pod."""
    sizes = [len(part.processes) for part in plan.hosts]
    if len(set(sizes)) == 1:
        yield f"dtrain_count={sizes[0]}"
    else:
        yield f"dtrain_counts=({' '.join(map(str, sizes))})"
        yield "dtrain_count=${dtrain_counts[dtrain_node_rank]}"


def _numbers(plan: LaunchPlan, tasks: list[Task]) -> Iterator[str]:
    """Lines that set the numbers of a process."""
    if uniform(plan, tasks):
        size = len(plan.hosts[0].processes)
        yield f"dtrain_rank=$((dtrain_node_rank * {size} + dtrain_local_rank))"
        yield f"dtrain_role={tasks[0].process.role} dtrain_index=$dtrain_rank"
        if plan.job.success_policy == "first_host":
            yield "((dtrain_node_rank == 0)) && dtrain_service= || dtrain_service=1"
    else:
        own = [[*numbers(task), f"dtrain_service={'1' * task.process.service}"] for task in tasks]
        yield from _case(tasks, map("; ".join, own))


def _case(tasks: list[Task], lines: Iterable[str]) -> Iterator[str]:
    """For each process, its line."""
    yield "case $dtrain_node_rank.$dtrain_local_rank in"
    for task, line in zip(tasks, lines, strict=True):
        yield f"  {task.part.node_rank}.{task.local_rank}) {line} ;;"
    yield "esac"
