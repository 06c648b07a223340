"""The launch plan as scripts: one for each process, to be run by hand on its host.

A script does what the node agent does for that process, in the same order: the job's setup
lines, the environment, the working folder, the program.

Where the file names no port, a launch draws one. The scripts use the first port of the range, or
a ``MASTER_PORT`` that is already set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dtrain.launchplan.plan import HostPlan, LaunchPlan, Process
from dtrain.quoting import Command, path, sh, word, words


def files(plan: LaunchPlan) -> Iterator[tuple[str, str]]:
    """``(relative path, text)`` of every file: ``<host>/<role>-<index>.sh`` and ``.env``."""
    for part in plan.hosts:
        for process in part.processes:
            stem = f"{part.host.name}/{process.role}-{process.index}"
            yield f"{stem}.sh", script(plan, part, process)
            yield f"{stem}.env", environment_file(plan, part, process)


def environment_file(plan: LaunchPlan, part: HostPlan, process: Process) -> str:
    """Assignments that a shell reads; secrets are named, not set."""
    secret = [
        f"# {name} is a secret: it comes from the caller's environment\n"
        for name in plan.job.secrets
    ]
    return "".join(secret) + assignments({**part.environment, **process.environment})


def assignments(environment: Mapping[str, str]) -> str:
    """``NAME=value`` lines, quoted for a POSIX shell."""
    return "".join(f"{name}={word(value)}\n" for name, value in environment.items())


def script(plan: LaunchPlan, part: HostPlan, process: Process) -> str:
    """A bash script that runs one process on its host."""
    name = f"{process.role}-{process.index}"
    lines = [
        "#!/usr/bin/env bash",
        f"# {process.role} {process.index} of {_comment(plan.name)}; run it on {part.host.name}:",
        f"#   bash {name}.sh",
        "# Written by `dtrain launch --dry-run --output`.",
        "",
        'here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit',
    ]
    lines += [f': "${{{secret}:?is a secret: export it first}}"' for secret in plan.job.secrets]
    chosen = plan.job.framework == "torch" and plan.job.rendezvous.port is None
    if chosen:
        lines.append("master_port=${MASTER_PORT:-}")
    lines += [str(sh("eval ", word(line), " || exit")) for line in plan.job.setup]
    lines += [
        "set -o allexport",
        str(sh('. "$here"/', word(f"{name}.env"), " || exit")),
        "set +o allexport",
    ]
    if chosen and "MASTER_PORT" in part.environment:
        lines.append("MASTER_PORT=${master_port:-$MASTER_PORT}")
    lines += [f"export {secret}" for secret in plan.job.secrets]
    if part.route_to is not None:
        lines += _gloo_interface(part.route_to)
    command = words(process.argv)
    if chosen and process.role == "torchrun":
        command = _torchrun(process.argv, str(plan.job.rendezvous.first_port))
    lines += [str(sh("cd -- ", path(part.workdir), " || exit")), str(sh("exec ", command))]
    return "\n".join(lines) + "\n"


def _torchrun(argv: Sequence[str], port: str) -> Command:
    """torchrun's command line, with its caller's port in the place of ``port``."""
    options = ("--master-port=", "--rdzv-endpoint=")
    at = next(index for index, option in enumerate(argv) if option.startswith(options))
    own = sh(word(argv[at].removesuffix(port)), f'"${{master_port:-{port}}}"')
    return sh(words(argv[:at]), " ", own, " ", words(argv[at + 1 :]))


def _gloo_interface(peer: str) -> list[str]:
    """Lines that name the interface which leads to ``peer``, as the node agent does."""
    address = sh("$(getent ahosts ", word(peer), " | awk 'NR == 1 {print $1}')")
    return [
        f'if [ -z "${{GLOO_SOCKET_IFNAME:-}}" ] && route=$(ip -o route get "{address}"); then',
        "  route=${route#* dev }",
        "  export GLOO_SOCKET_IFNAME=${route%% *}",
        "fi",
    ]


def _comment(text: str) -> str:
    return " ".join(text.split())
