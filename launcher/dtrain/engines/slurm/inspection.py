"""`dtrain check` on Slurm: asks Slurm about the request, and looks at the machines in a short step.

The step asks for the same machines, GPUs and CPUs as the job. It runs only where machines are free
at once, so a check never waits in the queue. If the user already has an allocation, the step runs
on its machines, and there is no request to judge.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from dtrain.checks import Evidence, Finding, HostFacts, Severity
from dtrain.checks.finding import error, warning
from dtrain.diagnostics import AnswerError, ConnectError, NodeError, PrepareError
from dtrain.engines.slurm import allocation
from dtrain.engines.slurm.judgement import RequestJudge
from dtrain.engines.slurm.login_shell import LIMIT, CommandAnswer, LoginShell, opened
from dtrain.engines.slurm.partitions import Partition
from dtrain.engines.slurm.script import batch_options, render, requested
from dtrain.engines.slurm.state import parse
from dtrain.engines.slurm.step import program_start
from dtrain.engines.slurm.submission import SubmitError, is_unanswered, login_host
from dtrain.environ.template import Template
from dtrain.launchplan.build import build
from dtrain.launchplan.plan import HostPlan, LaunchPlan
from dtrain.messages.decode import ProtocolError, parse_object
from dtrain.messages.facts import MAX_ANSWER, read_gathered
from dtrain.node.boot import framed
from dtrain.node.facts.orders import StepOrder
from dtrain.node.programs import program
from dtrain.node.slurm.wire import StepInput
from dtrain.quoting import path, sh
from dtrain.runs.request import Request
from dtrain.session.facts.everywhere import everywhere
from dtrain.session.facts.gather_order import THOROUGH, gather_order
from dtrain.spec.model import Slurm
from dtrain.transport.contract import Transport
from dtrain.wording import counted

STEP_MINUTES = 5
"""The step's time limit. It takes as long as the import of the framework."""
PATIENCE = 30
"""Seconds to wait for free machines."""
PROBES = ("machine", "memory", "script", "storage", "interpreter", "infiniband", "gpus")
ATTEMPTED = "checking the machine"

_T = TypeVar("_T")
_STARTED = re.compile(r"^([0-9]{1,6}) @ (\S{1,255})$", re.MULTILINE)
_BUSY = ("busy", "queued and waiting", "not available now", "immediate execution impossible")


def examine(request: Request, transport: Transport, stopped: Callable[[], bool]) -> Evidence:
    """The evidence of a file with `cluster.slurm`. Problems become findings or failures. For
    ``stopped`` see `everywhere`."""
    plan = build(request.spec())

    def look(shell: LoginShell) -> Evidence:
        if request.allocation:
            return _inside(request, plan, shell)
        return _examine(request, plan, shell)

    limit = 4 * LIMIT + PATIENCE + 60 * (STEP_MINUTES + 1)
    found = _on_login(request, transport, look, limit, stopped)
    if isinstance(found, NodeError):
        return Evidence.without_hosts(plan, failures=[found])
    return found


def before_launch(
    request: Request, transport: Transport, stopped: Callable[[], bool]
) -> tuple[Finding, ...]:
    """Why the job could never start, which takes less than a second to find. Nothing if Slurm does
    not answer: the submission tells. For ``stopped`` see `everywhere`."""
    plan = build(request.spec())

    def look(shell: LoginShell) -> tuple[Finding, ...]:
        tested, judge = _tested(request, plan, shell)
        if tested.status != 0 and is_unanswered(tested.words):
            return ()
        return tuple(judge.impossible(shell.partitions(), tested))

    found = _on_login(request, transport, look, 3 * LIMIT, stopped)
    return () if isinstance(found, NodeError) else found


def _on_login(
    request: Request,
    transport: Transport,
    work: Callable[[LoginShell], _T],
    limit: float,
    stopped: Callable[[], bool],
) -> _T | NodeError:
    """What ``work`` returns, or the error that it raises. For ``limit`` and ``stopped`` see
    `everywhere`."""
    spec = request.spec()
    slurm = spec.cluster.slurm or Slurm()
    if request.allocation:
        slurm = replace(slurm, login=None)
    login = replace(build(spec).hosts[0], host=login_host(slurm))

    def look(_: HostPlan) -> _T:
        with opened(transport, slurm) as shell:
            return work(shell)

    (found,) = everywhere(look, [login], limit, stopped=stopped)
    return found


def _inside(request: Request, plan: LaunchPlan, shell: LoginShell) -> Evidence:
    number = request.allocation or ""
    said = shell.run(["scontrol", "show", "job", "--oneliner", number])
    try:
        allocation.check(number, parse(said.out) if said.status == 0 else None, len(plan.hosts))
    except (SubmitError, ProtocolError) as failure:
        reason = failure.reason if isinstance(failure, NodeError) else str(failure)
        hint = failure.hint if isinstance(failure, NodeError) else ""
        problem = error(
            "cluster.nodes",
            [shell.host],
            f"the allocation of job {number} does not fit: {reason}",
            f"an allocation with {len(plan.hosts)} machines",
            hint,
            request.place("cluster.nodes"),
        )
        return Evidence.without_hosts(plan, request=[problem])
    return _in_step(plan, shell, request.place, number)


def _tested(
    request: Request, plan: LaunchPlan, shell: LoginShell
) -> tuple[CommandAnswer, RequestJudge]:
    """What `sbatch --test-only` answers, and who judges it."""
    tested = shell.run(["sbatch", "--test-only", *batch_options(plan)], render(plan).encode())
    return tested, RequestJudge(request.spec(), shell.host, request.place)


def _examine(request: Request, plan: LaunchPlan, shell: LoginShell) -> Evidence:
    tested, judge = _tested(request, plan, shell)
    partitions: Sequence[Partition] = ()
    try:
        if tested.status is None:  # the other commands would take as long
            found = [judge.refusal(tested)]
        else:
            partitions = shell.partitions()
            found = judge.judge(partitions, tested)
    except PrepareError:
        # Slurm does not answer. sbatch has failed too, and its error is the better one, unless
        # Slurm stopped just now.
        if tested.status == 0:
            raise
        found = [judge.refusal(tested)]
    if any(each.severity is Severity.ERROR for each in found):
        return Evidence.without_hosts(plan, request=found)
    if judge.free(partitions, tested):
        evidence = _in_step(plan, shell, request.place)
        return replace(evidence, request=(*found, *evidence.request))
    return Evidence.without_hosts(plan, request=[*found, _busy(plan, shell.host)])


def _in_step(
    plan: LaunchPlan, shell: LoginShell, place: Callable[[str], str], inside: str | None = None
) -> Evidence:
    """What each machine of a step reports. ``inside``: the number of the job whose allocation the
    step uses."""
    token = secrets.token_hex(8)
    shared = f"{plan.run_dir}/check-{token}"
    order = _order(plan, token, shared)
    make = sh("umask 077; LC_ALL=C mkdir -p -- ", path(plan.run_dir))
    write = sh(make, f" && printf %s {token} >", path(shared))
    written = shell.run(["sh", "-c", str(write)])
    if written.status != 0:
        problem = error(
            "cluster.run_dir",
            [shell.host],
            f"cannot write to {plan.run_dir}: {written.words}",
            "the login node and all machines share the folder, and the job can write there",
            "set cluster.run_dir to a shared folder of yours",
            place("cluster.run_dir"),
        )
        return Evidence.without_hosts(plan, request=[problem])
    try:
        stdin = framed(program("step")) + json.dumps(order).encode() + b"\n"
        done = shell.run(_srun(plan, inside), stdin, PATIENCE + 60.0 * STEP_MINUTES)
    finally:
        # A new folder is private. A launch makes one that `cluster.trust_group` can use.
        remove = sh("rm -f -- ", path(shared), "; rmdir -- ", path(plan.run_dir), " 2>/dev/null")
        shell.run(["sh", "-c", str(remove)])
    if not _STARTED.search(done.out):
        return Evidence.without_hosts(plan, request=[_not_started(plan, shell.host, done)])
    return _evidence(plan, done)


def _order(plan: LaunchPlan, token: str, shared: str) -> StepOrder:
    part = plan.hosts[0]
    # The check leaves out the variables that only the allocation decides.
    part = replace(
        part,
        environment=_known(part.environment),
        processes=tuple(
            replace(process, environment=_known(process.environment)) for process in part.processes
        ),
        ports=(),
    )
    depth = replace(THOROUGH, probes=PROBES)
    order = gather_order(plan, part, depth, token=token, workdir=part.workdir)
    return {
        **order,
        "ports": [],
        "addresses": {},
        "any_owner": True,
        "shared": {"path": shared, "content": token},
    }


def _known(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not isinstance(value, Template)}


def _srun(plan: LaunchPlan, inside: str | None) -> list[str]:
    part = plan.hosts[0]
    cpus = (plan.slurm or Slurm()).cpus or 1
    processes = max(1, sum(process.ranks for process in part.processes))
    # Each machine prints its name first: an error about a machine without Python needs it, too.
    start = 'echo "$SLURM_NODEID @ ${SLURMD_NODENAME:-$(hostname)}"; '
    start += program_start(plan, "dtrain-check")
    if inside is not None:  # beside the step of the user's shell
        machines = [f"--jobid={inside}", "--overlap", "--overcommit"]
    else:
        machines = [f"--immediate={PATIENCE}", f"--cpus-per-task={cpus * processes}"]
        machines += requested(plan)
    return [
        "srun",
        f"--job-name={plan.name}-check",
        f"--time={STEP_MINUTES}",
        f"--nodes={len(plan.hosts)}",
        f"--ntasks={len(plan.hosts)}",
        "--ntasks-per-node=1",
        *machines,
        *("--input=all", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--cpu-bind=none"),
        *("--chdir=/", "sh", "-c", start),
    ]


def _not_started(plan: LaunchPlan, login: str, done: CommandAnswer) -> Finding:
    said = done.words
    if any(word in said.lower() for word in _BUSY):
        return _unchecked(
            login,
            f"Slurm did not start the check on {counted(len(plan.hosts), 'machine')} within"
            f" {PATIENCE} s",
            "; a limit may be the cause, too: `sacctmgr show qos` and `sacctmgr show associations"
            " user=$USER` show yours",
        )
    return warning(
        "machines",
        [login],
        f"the step that checks the machines did not start: {said.strip().splitlines()[-1]}",
        "a step starts",
        "try it by hand: srun --nodes=1 hostname",
    )


def _busy(plan: LaunchPlan, login: str) -> Finding:
    count = len(plan.hosts)
    few = f"fewer than {count} such machines are" if count > 1 else "no such machine is"
    return _unchecked(login, f"{few} free now")


def _unchecked(login: str, seen: str, remedy: str = "") -> Finding:
    return warning(
        "machines",
        [login],
        f"{seen}: not checked",
        "free machines: the check of Python, GPUs and folders needs them for a minute",
        f"try again later; `squeue` shows the jobs before yours{remedy}",
    )


def _evidence(plan: LaunchPlan, done: CommandAnswer) -> Evidence:
    names = {int(number): name for number, name in _STARTED.findall(done.out)}
    joined = StepInput(MAX_ANSWER)
    answers: dict[int, bytes] = {}
    for line in done.out.encode().splitlines(keepends=True):
        with contextlib.suppress(ValueError):  # other output
            if (found := joined.add(line)) is not None:
                answers[found[0]] = found[1]
    hosts, failures, every = [], [], []
    for number, part in enumerate(plan.hosts):
        name = names.get(number, f"machine {number}")
        part = replace(part, host=replace(part.host, name=name))
        every.append(part)
        try:
            if number not in answers:
                raise _no_answer(name, done)
            answer = parse_object(answers[number])
            facts = read_gathered(answer, ports=(), setup=plan.job.setup)["facts"]
            hosts.append(HostFacts(_with_gpus(part, facts), facts))
        except NodeError as failure:
            failures.append(failure)
        except ProtocolError as wrong:
            failures.append(AnswerError(name, ATTEMPTED, wrong))
    return Evidence(replace(plan, hosts=tuple(every)), tuple(hosts), tuple(failures))


def _with_gpus(part: HostPlan, facts: Mapping[str, Any]) -> HostPlan:
    """The part with the GPUs that Slurm gives it on this machine: not always the first ones."""
    devices = facts.get("granted", {}).get("devices", ())
    if len(devices) == len(part.host.gpus) and all(
        re.fullmatch(r"[0-9]{1,4}", each) for each in devices
    ):
        return replace(part, host=replace(part.host, gpus=tuple(map(int, devices))))
    return part


def _no_answer(name: str, done: CommandAnswer) -> NodeError:
    """The error for a machine without an answer. The reason is what srun or the program printed."""
    if done.status is None:
        return ConnectError(name, ATTEMPTED, f"no answer within {STEP_MINUTES} minutes")
    lines = [line for line in done.err.splitlines() if line.strip()]
    own = [line for line in lines if f" {name}:" in line]
    printed = [line for line in lines if not line.startswith("srun: ")]
    said = (printed or own or lines or ["it ended without an answer"])[-1]
    return PrepareError(
        name, ATTEMPTED, said, hint="set cluster.python to a Python 3.8 or newer of that machine"
    )
