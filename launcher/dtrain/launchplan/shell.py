"""The launch plan as scripts: one for each process, to run by hand on its host.

A script does the same as the node agent, in the same order: the job's setup lines, the
environment, the working folder, the program. Values that are only known at launch have defaults
that the caller's environment overrides: ``DTRAIN_RUN_ID``, ``DTRAIN_ATTEMPT``, ``DTRAIN_RUN_DIR``
and, unless the file sets a port, ``MASTER_PORT``. The ports in ``TF_CONFIG`` are the first of the
range.
"""

from __future__ import annotations

from collections.abc import Iterator

from dtrain.environ.template import Slot, Template
from dtrain.launchplan.environment import NodeVariable
from dtrain.launchplan.plan import HostPlan, LaunchPlan, Process
from dtrain.quoting import ShellCommand, path, sh, word


def files(plan: LaunchPlan) -> Iterator[tuple[str, str]]:
    """``(relative path, text)`` of every file: ``<host>/<role>-<index>.sh`` and ``.env``."""
    for part in plan.hosts:
        for process in part.processes:
            stem = f"{part.host.name}/{process.name}"
            yield f"{stem}.sh", script(plan, part, process)
            yield f"{stem}.env", _environment_file(plan, part, process)


def _environment_file(plan: LaunchPlan, part: HostPlan, process: Process) -> str:
    """Shell assignments. Secrets appear only by name, in comments."""
    secret = [
        f"# {name} is a secret: it comes from the caller's environment\n"
        for name in plan.job.secrets
    ]
    if part.enclosure is not None:
        secret.append("unset PYTHONPATH  # of the host\n")
    environment = exported(part, process).items()
    lines = [str(sh(name, "=", _assigned(value))) for name, value in environment]
    for name, variable in {**part.node_variables, **process.node_variables}.items():
        value = completed(name, variable)
        lines.append(f"# {name}: {value}" if variable.kind == "interface" else f"{name}={value}")
    return "".join(secret) + "".join(f"{line}\n" for line in lines)


def exported(part: HostPlan, process: Process) -> dict[str, str]:
    """The environment that a script sets; without the variables that the client of a container
    engine takes from its command line."""
    client = {*part.enclosure.left_out} - {"DTRAIN_RUN_DIR"} if part.enclosure else {}
    environment = {**part.environment, **process.environment}
    return {name: value for name, value in environment.items() if name not in client}


def completed(name: str, variable: NodeVariable) -> str:
    """The value of a variable that the node completes, as shell text. For a network interface, a
    description, because a shell needs several lines to find it."""
    if variable.kind == "interface":
        return f"the interface that leads to {variable.value}, unless set"
    if name == "DTRAIN_RUN_DIR":
        return "${DTRAIN_RUN_DIR:-${dtrain_here:-$PWD}}"
    value = path(variable.value)
    if variable.kind == "folder" and not variable.value.startswith(("/", "~")):
        value = sh("${dtrain_workdir:-$PWD}/", word(variable.value))
    if variable.kind in ("file", "pipe"):
        value = sh("$DTRAIN_RUN_DIR/", argument(variable.value))
    if variable.place == "front":
        return f"{value}${{{name}:+:${name}}}"
    if variable.place == "default":
        for other in reversed((name, *variable.instead)):
            value = sh(f"${{{other}-", value, "}")
    return str(value)


def script(plan: LaunchPlan, part: HostPlan, process: Process) -> str:
    """A bash script that runs one process on its host."""
    name = process.name
    lines = [
        "#!/usr/bin/env bash",
        f"# {process.role} {process.index} of {comment(plan.name)}; run it on {part.host.name}:",
        f"#   bash {name}.sh",
        "# Written by `dtrain launch --dry-run --output`.",
        "",
        'dtrain_here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit',
    ]
    lines += [f': "${{{secret}:?is a secret: export it first}}"' for secret in plan.job.secrets]
    lines += [str(sh("cd -- ", path(part.workdir), " || exit")), "dtrain_workdir=$PWD"]
    lines += [str(sh("eval ", word(line), " || exit")) for line in plan.job.setup]
    lines += [
        "set -o allexport",
        str(sh('. "$dtrain_here"/', word(f"{name}.env"), " || exit")),
        "set +o allexport",
    ]
    lines += [f"export {secret}" for secret in plan.job.secrets]
    for variable, value in part.node_variables.items():
        if value.kind == "interface":
            lines += find_interface(variable, value)
    lines += given_to_client(plan, part, process)
    lines += ['cd -- "$dtrain_workdir" || exit', f"exec {command(process)}"]
    return "\n".join(lines) + "\n"


def command(process: Process) -> ShellCommand:
    """The process's program and arguments. ``~`` in front of the program is the home folder."""
    program, *arguments = (*process.container, *process.argv)
    first = path(program) if program.startswith("~/") else argument(program)
    return ShellCommand(" ".join(map(str, (first, *map(argument, arguments)))))


def argument(text: str) -> ShellCommand:
    """``text`` as one argument, with shell expansions for the values only known at launch."""
    if not isinstance(text, Template):
        return word(text)
    parts = [f'"{part.shell}"' if isinstance(part, Slot) else word(part) for part in text.parts]
    return sh(*parts)


def _assigned(value: str) -> ShellCommand:
    """``value`` for an assignment, in which a shell does not split expansions into words."""
    if isinstance(value, Template) and len(value.parts) == 1:
        return sh(*(part.shell if isinstance(part, Slot) else word(part) for part in value.parts))
    return argument(value)


def find_interface(name: str, variable: NodeVariable) -> list[str]:
    """Lines that find the interface for another host, in the same way as the node agent."""
    if variable.instead:
        (other,) = variable.instead  # set by the lines before
        return [f'[ -z "${{{other}+set}}" ] || export {name}=${{{name}-${other}}}']
    address = sh("$(getent ahosts ", argument(variable.value), " | awk 'NR == 1 {print $1}')")
    return [
        f'if [ -z "${{{name}+set}}" ] && dtrain_route=$(ip -o route get "{address}"); then',
        "  dtrain_route=${dtrain_route#* dev }",
        f"  export {name}=${{dtrain_route%% *}}",
        "fi",
    ]


def given_to_client(plan: LaunchPlan, part: HostPlan, process: Process) -> list[str]:
    """Lines that give the client of a container engine the environment of its worker."""
    if part.enclosure is None or not part.enclosure.prefix:
        return []
    own = {**part.environment, **process.environment}
    names = " ".join([*own, *part.node_variables, *process.node_variables, *plan.job.secrets])
    given = f'export "{part.enclosure.prefix}$dtrain_name=${{!dtrain_name}}"'
    return [
        f"for dtrain_name in {names}; do",
        f'  [ -z "${{!dtrain_name+set}}" ] || {given}',
        "done",
    ]


def comment(text: str) -> str:
    """``text`` on one line, for a comment."""
    return " ".join(text.split())
