"""What the job's image has: a script that finds out, and what is missing for the job. Pure."""

from __future__ import annotations

import marshal
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from dtrain.checks import Evidence, Finding, HostFacts, Severity, files, software
from dtrain.checks.finding import error
from dtrain.engines.kubernetes import manifest
from dtrain.engines.kubernetes.script import MARK
from dtrain.engines.kubernetes.training_runtime import TrainingRuntime
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.decode import decode, parse_object
from dtrain.messages.facts import Interpreter
from dtrain.node import programs
from dtrain.node.boot import boot_text, framed
from dtrain.quoting import path, sh, word, words
from dtrain.records import dataclass

PROGRAMS = ("bash", "mkfifo")
"""What the script of a pod uses in any case."""
SED = "GNU sed"
"""That of BusyBox does not have -u, without which lines arrive late."""
_UNPACKING = ("tar", "gzip")
_LABEL = "dtrain-check"


def script(plan: LaunchPlan) -> str:
    """Shell text that writes what the image has, each fact on a line that begins with `MARK`."""
    part = plan.hosts[0]
    lines = [
        "exec 4>&1 2>&1",
        f"for program in {words(_needed(plan))}; do",
        f'  command -v "$program" >/dev/null || echo "{MARK} missing=$program"',
        "done",
        f'sed -u "" </dev/null >/dev/null 2>&1 || echo "{MARK} missing={SED}"',
        f'cd -- {path(part.workdir)} 2>/dev/null && echo "{MARK} workdir=yes"',
    ]
    if plan.job.script is not None:
        lines.append(f'[ -f {path(plan.job.script)} ] && echo "{MARK} script=yes"')
    lines += [str(sh("export ", name, "=", word(text))) for name, text in plan.job.env.items()]
    if _needs_python(plan):
        options = {
            "framework": plan.job.framework,
            "module": plan.job.module if _has_code(plan) else None,
        }
        program = word(framed(programs.program("interpreter")).decode())
        marshalled = "".join(f"\\{byte:03o}" for byte in marshal.dumps(options, 4))
        feed = f"{{ printf %s {program}; printf {word(marshalled)}; }}"
        python = sh(path(part.python), " -c ", words([boot_text(isolated=False), _LABEL]))
        lines += [
            f"report=$({feed} | DTRAIN_REPORT_FD=3 {python} 3>&1 >&4)",
            f'printf "\\n{MARK} status=%s\\n" $?',
            f'printf "{MARK} report=%s\\n" "$report"',
        ]
    lines.append(f'echo "{MARK} done=yes"')
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ImageContents:
    """What the script wrote."""

    missing: frozenset[str]
    workdir: bool
    script: bool
    interpreter: Interpreter | None


def read(log: bytes) -> ImageContents | None:
    """None if the script did not get to its end. Raises ProtocolError."""
    values: dict[str, str] = {}
    missing = set()
    output = []
    for line in log.decode(errors="backslashreplace").splitlines():
        name, found, value = line.removeprefix(f"{MARK} ").partition("=")
        if not line.startswith(f"{MARK} ") or not found:
            output.append(line)
        elif name == "missing":
            missing.add(value)
        else:
            values[name] = value
    if "done" not in values:
        return None
    interpreter = None
    if "status" in values:
        status = values["status"]
        answer: dict[str, Any] = {
            "status": int(status) if re.fullmatch("[0-9]{1,3}", status) else None,
            "output": "\n".join(output).strip()[-4000:],
        }
        if report := values.get("report"):
            answer |= parse_object(report.encode())
        interpreter = decode(Interpreter, answer, "interpreter")
    return ImageContents(frozenset(missing), "workdir" in values, "script" in values, interpreter)


def judge(
    plan: LaunchPlan, contents: ImageContents, runtime: TrainingRuntime | None
) -> Iterator[Finding]:
    """What the job needs and the image does not have. ``runtime``: of a TrainJob."""
    needed = (*_needed(plan), SED)
    missing = [name for name in needed if name in contents.missing]
    if missing:
        yield error(
            "image",
            [],
            f"the image has no {', '.join(missing)}",
            f"the image has {', '.join(needed)}, which the script of each pod uses",
            "add them to the image, or set cluster.kubernetes.image to another one",
        )
    part = plan.hosts[0]
    folders = runtime.folders if runtime is not None else ()
    variables = runtime.environment.values() if runtime is not None else ()
    evidence = Evidence(plan, (HostFacts(part, _facts(plan, contents, folders)),))
    python, name = part.python, plan.job.framework
    code = "put the code into the image or a volume (cluster.kubernetes.claims), or set job.sync"
    remedies = {
        "python": "add Python to the image, or set cluster.python to an interpreter in it",
        name: f"build the image with: {python} -m pip install {name}; or set"
        " cluster.kubernetes.image to another one",
    }
    for finding in (*software.judge(evidence), *files.judge(evidence)):
        found = replace(finding, remedy=remedies.get(finding.subject, code))
        # The pod has no volumes and does not run the setup lines.
        providers = ["job.setup"] if plan.job.setup else []
        if finding.subject in remedies and _uses_volumes(plan, variables, folders):
            providers.append("a volume")
        if runtime is not None and runtime.unseen:
            providers.append(runtime.unseen)
        if providers:
            found = replace(
                found,
                severity=Severity.WARNING,
                expected=f"{finding.expected}, unless {' or '.join(providers)} provides it",
            )
        yield found


def _facts(
    plan: LaunchPlan, contents: ImageContents, folders: Iterable[str]
) -> Mapping[str, Mapping[str, Any]]:
    """The contents in the form of the facts of a host, see `dtrain.node.facts`."""
    found: dict[str, Mapping[str, Any]] = {}
    part = plan.hosts[0]
    if contents.interpreter is not None:
        interpreter: dict[str, Any] = {**contents.interpreter}
        framework = interpreter.get("framework")
        if framework and framework.get("version"):
            # The pod has no GPUs: only the build counts.
            interpreter["framework"] = {**framework, "gpus": len(part.host.gpus)}
        found["interpreter"] = interpreter
    if _has_code(plan, folders):
        code: dict[str, Any] = {"workdir": part.workdir, "workdir_exists": contents.workdir}
        if name := plan.job.script:
            code |= {"path": posixpath.join(part.workdir, name), "exists": contents.script}
        found["script"] = code
    return found


def _needed(plan: LaunchPlan) -> tuple[str, ...]:
    return PROGRAMS if plan.job.sync is None else PROGRAMS + _UNPACKING


def _needs_python(plan: LaunchPlan) -> bool:
    part = plan.hosts[0]
    return plan.job.framework != "none" or part.processes[0].argv[0] == part.python


def _has_code(plan: LaunchPlan, folders: Iterable[str] = ()) -> bool:
    """Whether the image must have the code: no ConfigMap brings it, and no volume, also not one
    that a runtime mounts at ``folders``."""
    part = plan.hosts[0]
    code = posixpath.join(part.workdir, plan.job.script or "")
    return plan.job.sync is None and not _mounted(plan, [part.workdir, code], folders)


def _uses_volumes(plan: LaunchPlan, variables: Iterable[str], folders: Iterable[str]) -> bool:
    """Whether the interpreter or its packages may be in a volume. ``variables`` and ``folders``:
    what a runtime adds."""
    return _mounted(plan, [plan.hosts[0].python, *plan.job.env.values(), *variables], folders)


def _mounted(plan: LaunchPlan, texts: Iterable[str], more: Iterable[str]) -> bool:
    (container,) = manifest.pod_spec(plan)["containers"]
    mounts = [*(mount["mountPath"] for mount in container["volumeMounts"]), *more]
    folders = [mount.rstrip("/") for mount in mounts]
    paths = [f"{each}/" for text in texts for each in text.split(":")]
    return any(each.startswith(f"{folder}/") for each in paths for folder in folders)
