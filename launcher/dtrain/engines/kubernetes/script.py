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
from collections.abc import Iterator
from math import ceil

from dtrain.launchplan.plan import LaunchPlan
from dtrain.launchplan.pods import object_name, pod_address
from dtrain.launchplan.programs import CODE
from dtrain.launchplan.shell import command, comment
from dtrain.launchplan.tasks import Task, exports, numbers, prepared, tasks_of, uniform
from dtrain.quoting import path, word

NAME = "job.sh"
FOLDER = "/dtrain"
"""Folder in the container for the files of the run."""
FILES = "/etc/dtrain"
"""Folder in the container with this script, ``runtime.zip`` and ``code.tar.gz``."""
RUNTIME = "runtime.zip"
SYNCED = "code.tar.gz"
RESTARTS = "DTRAIN_RESTARTS"
"""Variable with the number of restarts so far."""
MARK = "[dtrain]"
"""In front of the script's own lines."""
PIECE = 450
"""Bytes of a long line in each of its pieces. With a name, a piece has less than the 512 bytes that
POSIX writes to a pipe without others in between. A larger number makes sed slow: from 1,000 on, its
table for the regular expression is full before a long line ends."""
BEGINS = f"{MARK} begins"
"""The first line of a log. A log without it has lost its first lines."""
ENDS = f"{MARK} ends"
"""The last line of a log that lacks none at its end."""
TERM = f"{MARK} TERM"
"""Before the processes get the TERM of a deletion."""


def render(plan: LaunchPlan) -> str:
    """The whole text of ``job.sh``. ``plan.kubernetes`` must be set."""
    tasks = tasks_of(plan)
    lines = [
        "#!/usr/bin/env bash",
        f"# {comment(plan.name)}: all processes of one pod.",
        "exec 2>&1 # Kubernetes does not keep the order of two streams.",
        f'echo "{BEGINS}"',
        "",
        *_values(plan),
        "",
        "# One process: becomes number $dtrain_local_rank of this pod.",
        *_process(plan, tasks),
        "",
        *_start(plan, tasks),
        "",
        *_end(plan),
    ]
    return "\n".join(lines) + "\n"


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
    rendezvous, keys = plan.job.rendezvous, plan.kubernetes
    if rendezvous.port is not None or keys is None or not keys.host_network:
        return 0
    # Another job may use the same machine.
    firsts = rendezvous.first_ports(max(len(part.ports) for part in plan.hosts))
    return zlib.crc32(object_name(plan.name, plan.run).encode()) % len(firsts)


def _serves(plan: LaunchPlan) -> bool:
    return any(process.service for part in plan.hosts for process in part.processes)


def _values(plan: LaunchPlan) -> Iterator[str]:
    """What differs from pod to pod, and from one attempt to the next."""
    objects = object_name(plan.name, plan.run)
    yield "dtrain_node_rank=$JOB_COMPLETION_INDEX"
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
    yield f"export DTRAIN_RUN_DIR={FOLDER}/run"
    yield 'if [ -e "$DTRAIN_RUN_DIR" ]; then'
    yield '  echo "this container cannot start again alone: the other pods do not wait for it"'
    yield "  exit 1"
    yield "fi"
    yield '(umask 077 && mkdir -p -- "$DTRAIN_RUN_DIR") || exit'
    if plan.run:
        yield f'ln -s {FILES}/{RUNTIME} "$DTRAIN_RUN_DIR" || exit # dtrain.runtime'
    if plan.job.sync is not None:
        folder = path(plan.hosts[0].workdir if plan.job.workdir else CODE)
        yield f"mkdir -p -- {folder} && tar -xzf {FILES}/{SYNCED} -C {folder} || exit"


def _process(plan: LaunchPlan, tasks: list[Task]) -> Iterator[str]:
    """The function that becomes a process."""
    part = tasks[0].part
    even = uniform(plan, tasks)
    common, own = exports(plan, tasks)
    yield "dtrain_process() {"
    yield from (f"  {line}" for line in (*prepared(plan, part), *common))
    programs = {str(command(task.process)) for task in tasks}
    if not even:
        yield "  case $dtrain_node_rank.$dtrain_local_rank in"
        for task, its in zip(tasks, own, strict=True):
            yield f"    {task.part.node_rank}.{task.local_rank}) {'; '.join(its) or ':'} ;;"
        yield "  esac"
    yield '  cd -- "$dtrain_workdir" || exit'
    if len(programs) == 1 or even:
        yield f"  exec {command(tasks[0].process)}"
    else:
        yield "  case $dtrain_node_rank.$dtrain_local_rank in"
        for task in tasks:
            number = f"{task.part.node_rank}.{task.local_rank}"
            yield f"    {number}) exec {command(task.process)} ;;"
        yield "  esac"
    yield "}"


def _start(plan: LaunchPlan, tasks: list[Task]) -> Iterator[str]:
    """Lines that start the processes of the pod in the background."""
    yield "# Puts a name in front of each line, and name+ in front of a piece of a longer one. Ends"
    yield "# with its input, or after $dtrain_last, which may follow a line without a newline."
    yield "dtrain_last=dtrain-$RANDOM$RANDOM$RANDOM"
    yield "dtrain_label() {"
    yield "  trap '' TERM"
    # G adds a newline, which P writes, also after a last line that had none. The hold space is
    # empty until that line.
    yield '  LC_ALL=C sed -nu "'
    yield "    /\\n/!{"
    yield "      /$dtrain_last\\$/{ s///; x; s/^/last/; x; /^\\$/q; }"
    # Bytes that continue a character of UTF-8 stay with its first one.
    piece = f".\\{{{PIECE}\\}}[\\x80-\\xbf]\\{{0,3\\}}"
    yield f"      /^.\\{{{PIECE}\\}}/s/{piece}/[$1+] &\\n/g"
    yield "    }"
    yield "    /\\n/{ P; D; }"
    yield '    s/^/[$1] /; G; P; /\\nlast\\$/q"'
    yield "}"
    yield ""
    yield "# TERM for all processes, and KILL after job.grace. What a process leaves behind when it"
    yield "# ends gets TERM and job.grace, too: the program that a script has started."
    yield "dtrain_status= dtrain_deadline= dtrain_processes=() dtrain_readers=() dtrain_names=()"
    yield "dtrain_left=()"
    if _serves(plan):
        yield "dtrain_main=() dtrain_done="
    yield "dtrain_stop() {"
    yield '  [ -z "$dtrain_deadline" ] || return'
    yield f"  dtrain_deadline=$((SECONDS + {ceil(plan.job.grace)}))"
    yield '  kill -TERM -- "${dtrain_processes[@]}" "${dtrain_left[@]}" 2>/dev/null'
    yield "}"
    yield "dtrain_term() {"
    yield f'  echo "{TERM}"'
    yield "  dtrain_status=${dtrain_status:-143}"
    yield "  dtrain_stop"
    yield "}"
    yield "trap dtrain_term TERM"
    yield ""
    sizes = [len(part.processes) for part in plan.hosts]
    if len(set(sizes)) == 1:
        yield f"dtrain_count={sizes[0]}"
    else:
        yield f"dtrain_counts=({' '.join(map(str, sizes))})"
        yield "dtrain_count=${dtrain_counts[dtrain_node_rank]}"
    yield "for ((dtrain_local_rank = 0; dtrain_local_rank < dtrain_count; dtrain_local_rank++)); do"
    if uniform(plan, tasks):
        yield f"  dtrain_rank=$((dtrain_node_rank * {sizes[0]} + dtrain_local_rank))"
        yield f"  dtrain_role={tasks[0].process.role} dtrain_index=$dtrain_rank"
    else:
        yield "  case $dtrain_node_rank.$dtrain_local_rank in"
        for task in tasks:
            own = "; ".join([*numbers(task), f"dtrain_service={'1' * task.process.service}"])
            yield f"    {task.part.node_rank}.{task.local_rank}) {own} ;;"
        yield "  esac"
    yield "  dtrain_name=$dtrain_role-$dtrain_index"
    yield "  dtrain_pipe=$DTRAIN_RUN_DIR/$dtrain_name"
    yield '  mkfifo "$dtrain_pipe.out" "$dtrain_pipe.err" || exit'
    yield '  dtrain_label "$dtrain_name" <"$dtrain_pipe.out" &'
    yield "  dtrain_readers+=($!)"
    yield '  dtrain_label "$dtrain_name err" <"$dtrain_pipe.err" &'
    yield "  dtrain_readers+=($!)"
    yield "  set -m # for a process group of its own"
    yield '  (trap - TERM; dtrain_process) </dev/null >"$dtrain_pipe.out" 2>"$dtrain_pipe.err" &'
    yield "  set +m"
    yield "  dtrain_processes+=($!)"
    yield '  dtrain_names+=("$dtrain_name")'
    if _serves(plan):
        yield '  [ -n "$dtrain_service" ] || dtrain_main+=("$dtrain_local_rank")'
    yield "done"
    yield "# dtrain_stop does not know a process that has just started."
    yield '[ -z "$dtrain_deadline" ] || kill -TERM "${dtrain_processes[@]}" 2>/dev/null'


def _end(plan: LaunchPlan) -> Iterator[str]:
    """Lines that wait until all processes have ended, and stop them if one fails."""
    yield "# A pipe to which nobody writes, to wait without a process of its own."
    yield 'mkfifo "$DTRAIN_RUN_DIR/never" && exec 9<>"$DTRAIN_RUN_DIR/never" || exit'
    yield "dtrain_waits() {"
    yield "  ((${#dtrain_processes[@]})) && return"
    yield '  [ -n "$dtrain_deadline" ] && ((SECONDS < dtrain_deadline)) || return'
    yield '  kill -0 -- "${dtrain_left[@]}" 2>/dev/null'
    yield "}"
    yield "while dtrain_waits; do"
    yield "  read -r -t 0.2 -u 9"
    yield '  for dtrain_number in "${!dtrain_processes[@]}"; do'
    yield '    kill -0 "${dtrain_processes[dtrain_number]}" 2>/dev/null && continue'
    yield '    wait "${dtrain_processes[dtrain_number]}"'
    yield "    dtrain_ended=$?"
    yield "    dtrain_time=${EPOCHREALTIME:-$(date +%s)}"
    name = "${dtrain_names[dtrain_number]}"
    yield f'    echo "{MARK} {name} ended: $dtrain_ended at ${{dtrain_time/,/.}}"'
    yield '    dtrain_left+=("-${dtrain_processes[dtrain_number]}")'
    yield '    [ -z "$dtrain_deadline" ] || kill -TERM -- "${dtrain_left[@]: -1}" 2>/dev/null'
    yield '    unset "dtrain_processes[dtrain_number]"'
    if _serves(plan):
        yield '    [ -z "$dtrain_done" ] || continue'
    yield "    if ((dtrain_ended)); then"
    yield "      dtrain_status=${dtrain_status:-$dtrain_ended}"
    yield "      dtrain_stop"
    yield "    fi"
    yield "  done"
    if _serves(plan):
        yield "  # Processes that serve the others end with the last of those."
        yield '  for dtrain_number in "${!dtrain_main[@]}"; do'
        yield '    [ -z "${dtrain_processes[dtrain_main[dtrain_number]]}" ] || continue'
        yield '    unset "dtrain_main[dtrain_number]"'
        yield "    if ((! ${#dtrain_main[@]})); then"
        yield "      dtrain_done=1"
        yield "      dtrain_stop"
        yield "    fi"
        yield "  done"
    yield '  if [ -n "$dtrain_deadline" ] && ((SECONDS >= dtrain_deadline)); then'
    yield '    kill -KILL "${dtrain_processes[@]}" 2>/dev/null'
    yield "  fi"
    yield "done"
    yield "# The last lines. A process that a worker has left may keep its pipe open, and the job"
    yield "# may have removed the name of the pipe: then nothing ends the reader."
    yield 'for dtrain_name in "${dtrain_names[@]}"; do'
    yield '  for dtrain_pipe in "$DTRAIN_RUN_DIR/$dtrain_name".{out,err}; do'
    yield '    if [ -p "$dtrain_pipe" ]; then'
    yield '      echo "$dtrain_last" 1<>"$dtrain_pipe" # <>: there may be no reader any more'
    yield "    else"
    yield "      dtrain_patience=100"
    yield "    fi"
    yield "  done"
    yield "done"
    yield 'while [ "$dtrain_patience" != 0 ] && kill -0 "${dtrain_readers[@]}" 2>/dev/null; do'
    yield "  read -r -t 0.05 -u 9"
    yield "  dtrain_patience=${dtrain_patience:+$((dtrain_patience - 1))}"
    yield "done"
    yield f'echo "{ENDS}"'
    yield "exit $((dtrain_status))"
