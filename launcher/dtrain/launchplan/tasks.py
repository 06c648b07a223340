"""The processes of a launch as the tasks of one script that starts them all. Pure.

Where an engine starts all processes with one script, the numbers of each are shell variables (see
`dtrain.environ.template`). The processes of a uniform job differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtrain.launchplan.plan import HostPlan, LaunchPlan, Process
from dtrain.launchplan.shell import argument, completed, exported
from dtrain.quoting import path, sh, word
from dtrain.records import dataclass
from dtrain.spec.model import LAUNCH_ROLES


@dataclass(frozen=True, slots=True)
class Task:
    """A process, and its number among all processes of the job."""

    rank: int
    local_rank: int
    part: HostPlan
    process: Process


def tasks_of(plan: LaunchPlan) -> list[Task]:
    """All processes in the order of their ranks."""
    found = [(part, process) for part in plan.hosts for process in part.processes]
    if not plan.job.ranked:
        found.sort(key=lambda one: (LAUNCH_ROLES.index(one[1].role), one[1].index))
    # By identity: processes are large to compare.
    local = {
        id(process): number for part in plan.hosts for number, process in enumerate(part.processes)
    }
    return [
        Task(rank, local[id(process)], part, process) for rank, (part, process) in enumerate(found)
    ]


def uniform(plan: LaunchPlan, tasks: Sequence[Task]) -> bool:
    """Whether the numbers of hosts and processes tell the tasks apart: each host runs as many as
    every other."""
    size = len(plan.hosts[0].processes)
    if len(tasks) != len(plan.hosts) * size or len({task.process.role for task in tasks}) > 1:
        return False
    return all(
        task.process.index == task.rank == task.part.node_rank * size + task.local_rank
        for task in tasks
    )


def numbers(task: Task) -> Iterator[str]:
    """Assignments of the shell variables of a task."""
    yield f"dtrain_rank={task.rank}"
    yield f"dtrain_local_rank={task.local_rank}"
    yield f"dtrain_node_rank={task.part.node_rank}"
    yield f"dtrain_role={task.process.role}"
    yield f"dtrain_index={task.process.index}"


def prepared(plan: LaunchPlan, part: HostPlan) -> Iterator[str]:
    """Lines that enter the working folder and run the job's setup lines."""
    yield f"cd -- {path(part.workdir)} || exit"
    yield "dtrain_workdir=$PWD"
    if plan.job.setup and "PATH" in part.node_variables:
        # Setup lines find the programs beside cluster.python.
        yield f"export PATH={completed('PATH', part.node_variables['PATH'])}"
    for line in plan.job.setup:
        yield f"eval {word(line)} || exit"


def exports(plan: LaunchPlan, tasks: Sequence[Task]) -> tuple[list[str], list[list[str]]]:
    """Lines that export the environment: those of all tasks, and the others of each task. The tasks
    of a uniform job differ only in shell variables."""
    lines = [exported_lines(task) for task in (tasks[:1] if uniform(plan, tasks) else tasks)]
    common = [line for line in lines[0] if all(line in other for other in lines)]
    return common, [[line for line in its if line not in common] for its in lines]


def exported_lines(task: Task) -> list[str]:
    """Lines that export the environment of a task."""
    part, process = task.part, task.process
    environment = exported(part, process).items()
    lines = ["unset PYTHONPATH # of the host"] if part.enclosure else []
    lines += [str(sh("export ", name, "=", argument(text))) for name, text in environment]
    for name, variable in {**part.node_variables, **process.node_variables}.items():
        if name != "DTRAIN_RUN_DIR" and variable.kind != "interface":
            lines.append(f"export {name}={completed(name, variable)}")
    return lines
