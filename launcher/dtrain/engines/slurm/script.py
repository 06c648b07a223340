"""The launch plan as one batch script, ``job.sbatch``. Pure.

The script needs no dtrain on the cluster: ``sbatch job.sbatch``. It runs on the first machine of
the allocation, reads the list of machines, and starts the processes with srun. Each process gets
the environment of an SSH launch. The values that only the allocation decides are shell variables,
all named ``dtrain_...`` (see `dtrain.environ.template`).

A job that fails, or that reaches its time limit, goes back to the queue up to ``restart.max``
times, and Slurm counts how often it started. In an allocation that the user has, the script starts
itself again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

from dtrain.environ.template import Slot, Template
from dtrain.launchplan.container import pyxis
from dtrain.launchplan.plan import HostPlan, LaunchPlan, Process
from dtrain.launchplan.script_file import fill
from dtrain.launchplan.shell import (
    argument,
    command,
    comment,
    find_interface,
    given_to_client,
)
from dtrain.launchplan.tasks import Task, exports, numbers, prepared, tasks_of, uniform
from dtrain.quoting import path, sh, word
from dtrain.spec.model import Container, Slurm
from dtrain.wording import counted

NAME = "job.sbatch"
SCRIPT = Path(__file__).with_name(NAME)

WARNING = 60
"""Seconds that Slurm may send a signal late: it looks at time limits once a minute."""

BETWEEN_PORTS = 97
"""Between the ports of two attempts: the jobs after this one have the next ports."""

TIME_LIMIT = "the time limit is near"
"""What the script writes about USR1."""
PREEMPTED = "another job has preempted this one"
"""What the script writes after a preemption in which its processes had time to end."""

SERVICES = "dtrain_service"
"""The function of the script, and the name of the step, of processes that serve the others."""
OF_SERVICES = "dtrain: services: "
"""In front of what srun says about the tasks of that step."""

_IDENTITY = (
    "dtrain_rank=$SLURM_PROCID dtrain_local_rank=$SLURM_LOCALID dtrain_node_rank=$SLURM_NODEID"
)

_OUTPUT = '"$DTRAIN_RUN_DIR/$dtrain_role-$dtrain_index"'
"""Begins the names of the files of one process."""

_OF_A_JOB = re.compile(
    "--(output|error|input|open-mode|mail-.*|dependency|begin|hold|deadline|time-min|parsable|wait"
    "|quiet|verbose|get-user-env|ignore-pbs|kill-on-invalid-dep|comment)"
)
"""Options that say how a job waits and where its script writes, and not what machines it needs."""

_BARE = re.compile(r"[A-Za-z0-9@%+:,./_=&|*()!\[\]-]+")


def render(plan: LaunchPlan, *, in_allocation: bool = False) -> str:
    """The whole text of ``job.sbatch``. ``plan.slurm`` must be set. ``in_allocation``: for a script
    that runs in an allocation without sbatch."""
    tasks = tasks_of(plan)
    main = [task for task in tasks if not task.process.service]
    services = [task for task in tasks if task.process.service]
    image = _by_pyxis(plan)
    title = f"{comment(plan.name)}, written by `dtrain launch --dry-run`. Submit it: sbatch {NAME}"
    saved = None
    if plan.run and not in_allocation:
        saved = sh(path(plan.run_dir), "/nodes/", word(plan.run), "/status")
    leave = "exit" if saved is None else "dtrain_exit"
    unfinished = "$dtrain_stopped$dtrain_broken" if services else "$dtrain_stopped"
    blocks = {
        "services": bool(services),
        "pyxis": image is not None,
        "uneven": not uniform(plan, main),
        "ends": bool(plan.run),
        "saved": saved is not None,
        "restart": plan.job.restart.max > 0,
    }
    gaps = {
        "options": (f"#SBATCH {_directive(option)}" for option in batch_options(plan)),
        "title": [f"# {title}"],
        "secrets": (
            f': "${{{name}:?is a secret: export it before sbatch}}"' for name in plan.job.secrets
        ),
        "values": _values(plan),
        "hosts_counted": _hosts_counted(plan),
        "team_folder": _team_folder(plan),
        "process": _process(plan, main),
        "process_program": _program(plan, main),
        "service": _process(plan, services),
        "service_program": _program(plan, services),
        "kill": [f'{{ sleep {ceil(plan.job.grace)}; kill -TERM "$2"; }} 2>/dev/null &'],
        "container": _container(plan, image),
        "ends": [f"dtrain_ends={path(plan.run_dir)}/nodes/$dtrain_run"],
        "start_services": _srun(SERVICES, plan, services, in_allocation=in_allocation),
        "start_processes": _srun("dtrain_process", plan, main, in_allocation=in_allocation),
        "exit_saved": [f'dtrain_exit() {{ echo "$1" >{saved}; exit "$1"; }}'],
        "exit_done": [f'((dtrain_status == 0)) && [ -z "{unfinished}" ] && {leave} 0'],
        "again": _again(plan, in_allocation=in_allocation),
        "exit": [f'{leave} "$dtrain_status"'],
    }
    return fill(SCRIPT.read_text("utf-8"), blocks, gaps)


def step_processes(plan: LaunchPlan, *, services: bool = False) -> list[tuple[HostPlan, Process]]:
    """The processes of the main step, or of that of the services, in the order of srun's task
    numbers."""
    found = [task for task in tasks_of(plan) if task.process.service is services]
    return [(task.part, task.process) for task in found]


def batch_options(plan: LaunchPlan) -> Iterator[str]:
    slurm = plan.slurm or Slurm()
    processes = [sum(process.ranks for process in part.processes) for part in plan.hosts]
    yield f"--job-name={plan.name}"
    yield f"--nodes={len(plan.hosts)}"
    yield f"--ntasks-per-node={max(processes)}"
    if slurm.cpus is not None:
        yield f"--cpus-per-task={slurm.cpus}"
    yield from _resources(plan)
    if slurm.time is not None:
        yield f"--time={_time(slurm.time)}"
    yield f"--signal=B:USR1@{term_lead(plan)}"
    yield "--requeue" if plan.job.restart.max else "--no-requeue"
    given = {option.partition("=")[0] for option in slurm.options}
    if "--output" not in given:
        yield f"--output={plan.name}-%j.out"
    if "--open-mode" not in given:
        yield "--open-mode=append"
    yield from slurm.options


def _resources(plan: LaunchPlan) -> Iterator[str]:
    slurm = plan.slurm or Slurm()
    if gpus := len(plan.hosts[0].host.gpus):
        kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
        yield f"--gpus-per-node={kind}{gpus}"
    for name in ("partition", "account", "qos", "constraint", "reservation"):
        if (value := getattr(slurm, name)) is not None:
            yield f"--{name}={value}"


def requested(plan: LaunchPlan) -> Iterator[str]:
    """The options of srun that ask for machines like those of the job, without their number."""
    yield from _resources(plan)
    for option in (plan.slurm or Slurm()).options:
        if not _OF_A_JOB.fullmatch(option.partition("=")[0]):
            yield option


def _time(seconds: float) -> str:
    minutes, second = divmod(ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02}:{minute:02}:{second:02}"


def term_lead(plan: LaunchPlan) -> int:
    """Seconds before the time limit when workers get TERM. Slurm may send it a minute earlier."""
    limit = plan.slurm.time if plan.slurm is not None else None
    lead = ceil(plan.job.grace) + WARNING
    return min(lead, 65535) if limit is None else max(1, min(lead, int(limit / 2), 65535))


def _directive(option: str) -> str:
    """``option`` for a line that sbatch itself reads."""
    if _BARE.fullmatch(option):
        return option
    escaped = option.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _values(plan: LaunchPlan) -> Iterator[str]:
    """What differs from one start of the job to the next."""
    rendezvous, most = plan.job.rendezvous, plan.job.restart.max
    run = word(plan.run) if plan.run else sh(word(plan.name), "-$SLURM_JOB_ID")
    yield f"dtrain_run={run}"
    yield "dtrain_attempt=$((${SLURM_RESTART_COUNT:-0} + 1))"
    if most:
        words = f"the job was restarted {most} times (job.restart.max)"
        yield from _refused(f"dtrain_attempt > {most} + 1", words)
        yield "if ((dtrain_attempt > 1)); then"
        yield "  dtrain_run+=.$dtrain_attempt"
        yield '  echo "dtrain: attempt $dtrain_attempt" >&2'
        yield "fi"
    if rendezvous.port is None:
        firsts = rendezvous.first_ports(max(len(part.ports) for part in plan.hosts))
        # Another program may have taken the port of the last attempt.
        number = (
            f"(SLURM_JOB_ID + {BETWEEN_PORTS} * (dtrain_attempt - 1))" if most else "SLURM_JOB_ID"
        )
        yield f"dtrain_port=$(({firsts.start} + {number} % {len(firsts)}))"


def _hosts_counted(plan: LaunchPlan) -> Iterator[str]:
    count, given = len(plan.hosts), "${#dtrain_hosts[@]}"
    words = f"the job needs {counted(count, 'node')}, and the allocation has {given}"
    return _refused(f"{given} != {count}", words)


def _team_folder(plan: LaunchPlan) -> Iterator[str]:
    """Lines that create the folder of all runs. `dtrain launch` creates it by itself."""
    if plan.trust_group is not None and not plan.run:
        folder = sh(path(plan.run_dir), "/nodes")
        yield "# The team has one folder. If cluster.run_dir does not exist, it is not a team's."
        yield f"if mkdir -- {folder} 2>/dev/null; then"
        yield f"  chgrp -- {word(plan.trust_group)} {folder} && chmod 2770 -- {folder} || exit"
        yield "fi"


def _refused(condition: str, words: str) -> Iterator[str]:
    """Lines that end the job with a message if the ``condition`` holds."""
    yield f"if (({condition})); then"
    yield f'  echo "dtrain: {words}" >&2'
    yield "  exit 1"
    yield "fi"


def _process(plan: LaunchPlan, tasks: Sequence[Task]) -> Iterator[str]:
    """Lines that set what one of the ``tasks`` needs."""
    part = tasks[0].part
    common, own = exports(plan, tasks)
    folder = sh(path(plan.run_dir), "/nodes/$dtrain_run/${dtrain_hosts[dtrain_node_rank]}")
    if _by_pyxis(plan):
        yield '[ -z "$dtrain_pyxis" ] || export HOME=$dtrain_home'
    if gpus := len(part.host.gpus):
        yield from _gpus(gpus)
    if uniform(plan, tasks):
        yield _IDENTITY
        yield f"dtrain_role={tasks[0].process.role} dtrain_index=$dtrain_rank"
    else:
        yield "case $SLURM_PROCID in"
        for number, (task, lines) in enumerate(zip(tasks, own, strict=True)):
            yield f"  {number}) {'; '.join((*numbers(task), *lines))} ;;"
        yield "esac"
    yield f"DTRAIN_RUN_DIR={folder}"
    yield '(umask 077 && mkdir -p -- "$DTRAIN_RUN_DIR") || exit'
    if plan.run:
        yield "# dtrain.runtime"
        archive = sh(path(plan.run_dir), "/nodes/", word(plan.run), "/runtime.zip")
        yield f'ln -s {archive} "$DTRAIN_RUN_DIR" 2>/dev/null'
    yield "export DTRAIN_RUN_DIR"
    yield f"exec >>{_OUTPUT}.out 2>>{_OUTPUT}.err"
    yield from (*prepared(plan, part), *common)
    for variable, value in part.node_variables.items():
        if value.kind == "interface":
            yield from find_interface(variable, value)
    yield from given_to_client(plan, part, tasks[0].process)


def _gpus(count: int) -> Iterator[str]:
    yield "# The GPUs that Slurm gives the job on this node."
    yield 'IFS=, read -ra dtrain_gpus <<<"${CUDA_VISIBLE_DEVICES-}"'
    first = " ".join(map(str, range(count)))
    given = "${#dtrain_gpus[@]}"
    yield f"(({given})) || dtrain_gpus=({first})"
    words = f"the job needs {counted(count, 'GPU')} on each node, and Slurm gives it {given}"
    yield from _refused(f"{given} < {count}", words)


def _program(plan: LaunchPlan, tasks: Sequence[Task]) -> Iterator[str]:
    """Lines that replace the shell with the program. Under pyxis, the shell is in the container
    already."""
    process = tasks[0].process
    if _by_pyxis(plan):
        yield 'if [ -n "$dtrain_pyxis" ]; then'
        if "HOME" not in plan.job.env:
            yield '  HOME="$DTRAIN_RUN_DIR"'
        if plan.run:
            yield f"  echo $$ >{_OUTPUT}.pid"
        direct = command(replace(process, container=()))
        yield f"  exec {direct}"
        yield "fi"
    if plan.run:
        yield "# For dtrain's watcher on this machine."
        yield f"echo $$ >{_OUTPUT}.pid"
    yield f"exec {command(process)}"


def _srun(
    name: str, plan: LaunchPlan, tasks: Sequence[Task], *, in_allocation: bool
) -> Iterator[str]:
    """Lines that start the ``tasks`` in the background."""
    cpus = plan.slurm.cpus if plan.slurm else None
    options = [f"--ntasks={len(tasks)}"]
    prefix = ""
    if uniform(plan, tasks):
        options += [
            f"--nodes={len(plan.hosts)}",
            f"--ntasks-per-node={len(plan.hosts[0].processes)}",
            "--distribution=block",
        ]
    else:
        nodes = [task.part.node_rank for task in tasks]
        hosts = " ".join(f'"${{dtrain_hosts[{node}]}}"' for node in nodes)
        file = f'"$dtrain_folder/{name}"'
        yield f"printf '%s\\n' {hosts} >{file}"
        # The list decides on the nodes too; newer versions of Slurm refuse another count of them.
        counts = "-u SLURM_NTASKS_PER_NODE -u SLURM_NNODES -u SLURM_JOB_NUM_NODES"
        prefix = f"env {counts} SLURM_HOSTFILE={file} "
        options.append("--distribution=arbitrary")
    if prefix or in_allocation:  # beside another step, which may be that of the user's shell
        options.append("--overlap")
    options.append(f'--job-name="$dtrain_run.{name}"')
    if cpus is None:
        options.append("--cpu-bind=none")
        if in_allocation:  # salloc gives one CPU on each machine, unless it was asked for more
            options.append("--overcommit")
    else:
        options.append(f"--cpus-per-task={cpus * tasks[0].process.ranks}")
    options += ["--kill-on-bad-exit=1", "--wait=0", "--mpi=none", "--input=none", "--export=ALL"]
    if plan.run and name == "dtrain_process":
        options.append('--task-epilog="$dtrain_ends/ended"')
    variables = "dtrain_run dtrain_attempt dtrain_hosts dtrain_addresses"
    if _by_pyxis(plan):
        variables += " dtrain_pyxis dtrain_home"
        options.append('"${dtrain_container[@]}"')
    if plan.job.rendezvous.port is None:
        variables += " dtrain_port"
    # srun counts the tasks of each step from 0.
    mark = f' 2> >(sed -u "s/^srun: error: /{OF_SERVICES}&/" >&2)' if name == SERVICES else ""
    yield f"{prefix}srun {' '.join(options)} \\"
    yield f'  bash -c "$(declare -p {variables}; declare -f {name}); {name}"{mark} &'


def _by_pyxis(plan: LaunchPlan) -> Container | None:
    """The container of a job that pyxis starts, or apptainer in its place."""
    image = plan.job.container
    return image if image is not None and image.engine == "pyxis" else None


def _container(plan: LaunchPlan, image: Container | None) -> Iterator[str]:
    """Lines that look for the plugin, and set the options of srun that it needs."""
    if image is None or image.image.endswith(".sif"):
        return
    yield "if [[ $(srun --help 2>&1) == *--container-image* ]]; then"
    yield f"  dtrain_workdir=$(cd -- {path(plan.hosts[0].workdir)} && pwd) || exit"
    yield f"  dtrain_runs={path(plan.run_dir)}/nodes"
    yield '  (umask 077 && mkdir -p -- "$dtrain_runs") || exit'
    yield "  dtrain_pyxis=1 dtrain_container=("
    runs = Template(Slot("$dtrain_runs", "$dtrain_runs"))
    yield from (f"    {argument(option)}" for option in pyxis(image, runs))
    yield "  )"
    yield "fi"


def _again(plan: LaunchPlan, *, in_allocation: bool) -> Iterator[str]:
    """Lines that start the job again."""
    again = "goes back to the queue"
    go = ['scontrol requeue "$SLURM_JOB_ID" && sleep 60']
    if in_allocation:
        again = "starts again"
        go = ['[ -z "${dtrain_folder-}" ] || rm -r -- "$dtrain_folder"',
              'SLURM_RESTART_COUNT=$dtrain_attempt exec bash "$0"']  # fmt: skip
        yield '[ -z "$dtrain_stopped" ] || exit 1'
    if plan.run:
        last = sh(path(plan.run_dir), "/nodes/", word(plan.run), "/last-attempt")
        yield f"[ ! -e {last} ] || exit 1  # it hung: job.watchdog"
    yield f"if ((dtrain_attempt <= {plan.job.restart.max})); then"
    yield f'  echo "dtrain: attempt $dtrain_attempt ended; the job {again}" >&2'
    yield from (f"  {line}" for line in go)
    yield "fi"
