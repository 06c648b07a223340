"""How a Slurm job ended: its report, from the job's last state and its script's output. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

from dtrain.diagnostics import ExitCode
from dtrain.engines.followed_run import process_failure
from dtrain.engines.slurm.script import (
    OF_SERVICES,
    PREEMPTED,
    TIME_LIMIT,
    step_processes,
    term_lead,
)
from dtrain.engines.slurm.state import NO_OUTPUT, SlurmState
from dtrain.failures.cause import Failure, Report, all_finished, ended_early
from dtrain.launchplan.plan import LaunchPlan
from dtrain.records import dataclass

_TASKS = re.compile(
    rf"({OF_SERVICES})?srun: error: (\S{{1,1000}}): tasks? ([\d,-]{{1,1000}}): (.{{1,200}})"
)
_LOST_NODE = re.compile(rf"(?:{OF_SERVICES})?srun: error: Node failure on (\S{{1,1000}})")
_STATUS = re.compile(r"Exited with exit code (\d{1,3})")
_TIMED = r"\[\d{4}-\d\d-\d\dT[\d:.]{8,15}(?:Z|[+-]\d\d:?\d\d)?\]"
_STEPD = rf"(?:slurmstepd(?:-(?P<host>\S{{1,1000}}))?:|{_TIMED}) error: "
"""How the daemon begins a line; Slurm 26.05 writes the time in place of its name. It names its host
only where it was built for several daemons on one machine."""
_OUT_OF_MEMORY = re.compile(
    _STEPD + ".{0,200}(?:exceeded (?:job )?memory limit|oom[-_ ]kill)", re.I
)
_KILLED_BY_KERNEL = "Out Of Memory"
_OF_SLURM = re.compile(rf"(?:{OF_SERVICES})?(?:srun|slurmstepd|slurmstepd-\S+): |{_TIMED} error: ")
_STOPS = re.compile(
    r"srun: (?:launch/slurm: \S{1,100}: )?(?:Terminating |Job step aborted)"
    rf"|{_STEPD}\*\*\* STEP \S{{1,100}} ON \S{{1,1000}} CANCELLED "
)
"""Slurm begins to end the other tasks: with TERM, and then with KILL."""
_BEGUN = re.compile(r"^dtrain: attempt (\d{1,7})$", re.MULTILINE)
_QUEUED_AGAIN = re.compile(
    r"dtrain: attempt \d+ ended; the job (?:goes back to the queue|starts again)\n"
    rf"|{_STEPD}\*\*\* JOB \d+ .{{0,200}} DUE TO (?:JOB REQUEUE|PREEMPTION).*\n"
)
_RESTARTS = re.compile(r"^dtrain: attempt \d+ ended; ", re.MULTILINE)
"""The script itself has the job start again."""
_REQUEUED = re.compile(
    rf"^{_STEPD}\*\*\* JOB .{{0,200}} DUE TO (?P<why>[A-Z ]+[A-Z])", re.MULTILINE
)
_CAUSES = {
    "PREEMPTION": "PREEMPTED",
    "NODE FAILURE": "NODE_FAIL",
    "TIME LIMIT": "TIMEOUT",
    "JOB REQUEUE": "REQUEUED",
}
"""Slurm's words for why it ended a job, with the state of such a job without a restart."""
_SIGNALS = {signal.strsignal(each): each.name for each in signal.Signals}
_SCRIPT_LINES = 20
"""Lines of the script's output that a report shows."""


@dataclass(frozen=True, slots=True)
class SlurmEnding:
    """What is known about the end of a job."""

    job: str
    state: SlurmState | None
    """The last state; None if Slurm no longer knows the job."""
    plan: LaunchPlan
    script: str
    """The end of what the job's script wrote in the last attempt."""
    failures: tuple[Failure, ...]
    """The first cause first."""
    stopped_by: str = ""
    """Source of the request to stop, such as ``Ctrl-C``."""
    hang: str = ""
    """The hang for which dtrain ended the job."""
    waits: tuple[str, ...] = ()
    """Where the workers of that job waited."""
    finished: tuple[tuple[str, str, float], ...] = ()
    """As `ended_early` gets them."""

    def report(self) -> Report:
        state = self.state
        if state is not None and state.state == "COMPLETED":
            return Report(ExitCode.OK, all_finished(self.plan))
        if self.stopped_by and (state is None or state.state != "NODE_FAIL"):
            return Report(ExitCode.INTERRUPTED, self.stopped_by)
        if self.hang:
            return self._hung()
        if state is None and not self.failures:
            return self._forgotten()
        state = state or SlurmState("FAILED")
        if state.state == "FAILED" and (interrupted := self._interrupted()):
            return self._ended_by_slurm(replace(state, state=interrupted))
        if state.state in ("FAILED", "OUT_OF_MEMORY"):
            return self._failed(state)
        return self._ended_by_slurm(state)

    def before_restart(self) -> Report:
        """The report of an attempt that another one follows."""
        if self.hang:
            return self._hung()
        state = self.state or SlurmState("FAILED")
        if interrupted := self._interrupted():
            return self._ended_by_slurm(replace(state, state=interrupted))
        if self.failures:
            return self._failed(replace(state, state="FAILED"))
        return Report(ExitCode.JOB_FAILED, f"job {self.job} did not finish")

    def _hung(self) -> Report:
        return Report(ExitCode.JOB_FAILED, self.hang, problems=self.waits)

    def _interrupted(self) -> str:
        """The state of a job that ends as this attempt did, if Slurm interrupted it."""
        # The script stops the workers before Slurm does.
        if f"dtrain: {TIME_LIMIT}" in self.script:
            return "TIMEOUT"
        if f"dtrain: {PREEMPTED}" in self.script:
            return "PREEMPTED"
        requeued = None if _RESTARTS.search(self.script) else _REQUEUED.search(self.script)
        return _CAUSES.get(requeued["why"], "") if requeued is not None else ""

    def _failed(self, state: SlurmState) -> Report:
        first = next(iter(self.failures), None)
        words = "" if first is not None and first.words else self._script_words()
        early, why_early = ended_early(self.failures, self.finished)
        hints = [why_early]
        if first is not None and not early:
            # A process without words of its own may have ended as its script says.
            hints.append(replace(first, traceback=first.traceback or words).hint)
        memory = (
            state.state == "OUT_OF_MEMORY"
            or _OUT_OF_MEMORY.search(self.script) is not None
            or any(one.out_of_memory for one in self.failures)
        )
        if self.failures:
            reason = self._first_cause(memory=memory)
        elif memory:
            reason = "the job ran out of memory"
        elif state.signal == NO_OUTPUT:
            reason = "Slurm could not open the output file of the job's script"
            hints.append("cluster.run_dir must be a folder that all machines share")
        elif state.signal:
            reason = f"the job's script was killed by signal {state.signal}"
        else:
            reason = f"the job's script exited with status {state.status}"
        if memory:
            # Slurm enforces the job's own limit; what the kernel says comes after that.
            hints.insert(
                0,
                "the job may use only the memory that it asks Slurm for; cluster.slurm.options:"
                " ['--mem=0'] asks for all memory of each machine",
            )
        return Report(
            ExitCode.JOB_FAILED,
            reason,
            failures=self.failures,
            problems=tuple(filter(None, (words, early))),
            hint="\n".join(dict.fromkeys(filter(None, hints))),
        )

    def _first_cause(self, *, memory: bool) -> str:
        """``memory``: whether the job ran out of memory."""
        first, *others = self.failures
        if memory and first.ended_by == "SIGKILL":
            known = first.out_of_memory  # otherwise the host is not known either
            alike = [one.how == first.how for one in others if one.host == first.host or not known]
            if any(alike):
                # Slurm kills all processes on the host, and does not say which one was too large.
                return "the job ran out of memory" + (f" on {first.host}" if known else "")
        return first.summary

    def _ended_by_slurm(self, state: SlurmState) -> Report:
        code, hint, said = ExitCode.JOB_FAILED, "", ""
        match state.state:
            case "CANCELLED":
                reason = f"job {self.job} was cancelled outside dtrain"
                hint = "`scancel`, an administrator, or a limit of the cluster ended it"
                said = self._script_words()  # Slurm cancels a job whose prolog fails
            case "TIMEOUT" | "DEADLINE":
                reason = f"job {self.job} reached its time limit"
                reason += f" of {state.time_limit}" if state.time_limit else ""
                hint = "set a longer cluster.slurm.time"
                if f"dtrain: {TIME_LIMIT}" in self.script:
                    lead = term_lead(self.plan)
                    hint += (
                        f"; workers get TERM {lead} s before the limit, or up to a minute earlier"
                    )
            case "NODE_FAIL" | "BOOT_FAIL":
                code = ExitCode.NODE_FAILED
                lost = lost_hosts(self.script)
                reason = f"Slurm ended job {self.job}: {', '.join(lost) or 'a machine'} failed"
                hint = f"`sinfo --list-reasons` shows why\n{self._restart_hint}".rstrip()
            case "PREEMPTED":
                code = ExitCode.NODE_FAILED
                reason = f"job {self.job} was preempted by another job"
                hint = self._restart_hint
            case "REQUEUED":
                code = ExitCode.NODE_FAILED
                reason = f"job {self.job} was put back in the queue outside dtrain"
            case other:
                code = ExitCode.NODE_FAILED
                reason = f"job {self.job} ended in the state {other}"
        return Report(code, reason, problems=(said,) if said else (), hint=hint)

    @property
    def _restart_hint(self) -> str:
        if self.plan.job.restart.max:
            return ""
        return "with job.restart.max: 3, the job goes back to the queue after such an end"

    def _forgotten(self) -> Report:
        return Report(
            ExitCode.NODE_FAILED,
            f"Slurm no longer knows job {self.job}, so its exit status is unknown",
            hint="its output is complete: see its last lines. Slurm forgets finished jobs after"
            " some minutes (MinJobAge)",
        )

    def _script_words(self) -> str:
        """The last lines that the script itself wrote."""
        lines = [line for line in self.script.splitlines() if line.strip()]
        own = [line for line in lines if not _OF_SLURM.match(line)]
        if not self.failures:
            own = own or lines
        # All processes may have said the same.
        return "\n".join([*dict.fromkeys(own)][-_SCRIPT_LINES:])


def failed_tasks(script: str, plan: LaunchPlan, time: float) -> dict[int, Failure]:
    """The tasks that ``srun`` names as failed in one attempt, by number in its order, without
    those that Slurm ended after the first failure. The services come after the main step.
    ``time``: when the attempt ended, in seconds since the epoch."""
    main, lines = step_processes(plan), script.splitlines()
    processes = main + step_processes(plan, services=True)
    full = {found["host"] for found in _OUT_OF_MEMORY.finditer(script)}
    if None in full and len(plan.hosts) == 1:
        full.add(plan.hosts[0].host.name)
    # In a cgroup, the kernel kills one process, and srun names it.
    full -= {
        said[2]
        for said in map(_TASKS.match, lines)
        if said and said[4].startswith(_KILLED_BY_KERNEL)
    }
    found: dict[int, Failure] = {}
    ended: dict[int, Failure] = {}
    stopping = False
    for line in lines:
        stopping |= _STOPS.match(line) is not None
        if not (said := _TASKS.match(line)):
            continue
        status = _STATUS.match(said[4])
        name = _SIGNALS.get(said[4].removesuffix(" (core dumped)").strip())
        if killed := said[4].startswith(_KILLED_BY_KERNEL):
            name = "SIGKILL"
        first, end = (len(main), len(processes)) if said[1] else (0, len(main))
        for task in (first + number for number in _numbers(said[3], end - first)):
            part, process = processes[task]
            failure = process_failure(
                part,
                process,
                # A crash is reported late: it may have written its memory to disk.
                time + 1 if stopping and status else time,
                code=int(status[1]) if status else None,
                signal=name,
                memory_full=killed or part.host.name in full,
            )
            (ended if stopping and failure.cut_off else found).setdefault(task, failure)
    # Slurm ends the tasks of all hosts at once.
    return dict(sorted((found or ended).items(), key=lambda one: not one[1].out_of_memory))


def finished_tasks(
    plan: LaunchPlan, failed: Container[int], ends: Mapping[int, float]
) -> Iterator[tuple[str, str, float]]:
    """The tasks that ended with status 0, as `ended_early` gets them: srun names all others.
    ``ends``: when each ended."""
    for number, (part, process) in enumerate(step_processes(plan)):
        if number in ends and number not in failed:
            yield process.label, part.host.name, ends[number]


def latest_attempt(script: str) -> int:
    """The number of the last attempt that the script has begun, as far as it is known."""
    return max((int(number) for number in _BEGUN.findall(script)), default=1)


def of_attempt(script: str, number: int) -> str:
    """What the script wrote in one attempt."""
    begun = {int(found[1]): found for found in _BEGUN.finditer(script)}
    end = min((found.start() for later, found in begun.items() if later > number), default=None)
    if number in begun:
        return script[begun[number].end() + 1 : end]
    if begun and end is None:
        return ""  # it has not begun
    # The first attempt has no such line. The line of a later one may be cut off.
    return script[:end] if number == 1 else _QUEUED_AGAIN.split(script[:end])[-1]


def lost_hosts(script: str) -> Sequence[str]:
    """Each once: every step of a job says it."""
    found = map(_LOST_NODE.match, script.splitlines())
    return [*dict.fromkeys(said[1] for said in found if said)]


def _numbers(text: str, limit: int) -> Iterator[int]:
    """The numbers below ``limit`` in a list such as ``0-3,8``."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            yield from range(int(first), min(int(last or first) + 1, limit))
