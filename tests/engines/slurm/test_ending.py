"""The report of a job, from its last state and what its script wrote."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtrain.engines.slurm.ending import SlurmEnding, failed_tasks, latest_attempt, of_attempt
from dtrain.engines.slurm.script import OF_SERVICES, PREEMPTED, TIME_LIMIT
from dtrain.engines.slurm.state import SlurmState
from dtrain.failures.cause import in_order_of_blame
from dtrain.launchplan.build import build
from dtrain.launchplan.plan import LaunchPlan
from dtrain.spec.load import parse

FILE = "name: t\ncluster: {slurm: {}, nodes: 2, gpus: 2}\njob: {framework: torch, script: t.py}\n"

# As srun 22.05 writes it.
ONE_FAILS = """\
srun: error: b: task 2: Exited with exit code 7
srun: launch/slurm: _step_signal: Terminating StepId=1.0
srun: error: b: task 3: Terminated
srun: error: a: tasks 0-1: Terminated
"""
IGNORES_TERM = """\
srun: error: a: task 0: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=1.0
slurmstepd-a: error: *** STEP 1.0 ON a CANCELLED AT 2026-11-22T14:08:48 ***
srun: error: a: task 1: Terminated
srun: error: b: tasks 2-3: Killed
srun: Force Terminated StepId=1.0
"""
STEP_CANCELLED = """\
slurmstepd-a: error: *** STEP 1.0 ON a CANCELLED AT 2026-11-22T14:08:48 ***
srun: error: a: tasks 0-1: Terminated
srun: error: b: tasks 2-3: Exited with exit code 143
"""
CRASH = "srun: error: a: task 1: Segmentation fault (core dumped)\n"
FULL = """\
slurmstepd-b: error: StepId=3.0 exceeded memory limit (407388160 > 104857600), being killed
srun: error: a: tasks 0-1: Killed
srun: error: b: tasks 2-3: Killed
"""
OOM_KILL = """\
slurmstepd-b: error: Detected 1 oom-kill event(s) in StepId=3.0.
srun: error: b: task 3: Killed
"""
# In a cgroup, srun names the first host whose kernel has killed a task.
OOM_IN_CGROUP = """\
slurmstepd: error: Detected 1 oom_kill event in StepId=3.0. Some of the step tasks have been OOM \
Killed.
srun: error: b: task 3: Out Of Memory
srun: Terminating StepId=3.0
srun: error: a: tasks 0-1: Killed
"""
HOSTILE = """\
srun: error: a: tasks 0-99999999999999999999: Killed
srun: error: a: tasks -,5-2,x: Exited with exit code 999
srun: error: a: tasks 3: Exited with exit code
"""


def plan() -> LaunchPlan:
    return build(parse(FILE, "t.yaml")).on(("a", "b"))


def ending(state: SlurmState | None, script: str = "", stopped_by: str = "") -> SlurmEnding:
    failures = in_order_of_blame(failed_tasks(script, plan(), 5.0).values())
    return SlurmEnding("12", state, plan(), script, failures, stopped_by)


@pytest.mark.parametrize(
    ("script", "first"),
    [
        (ONE_FAILS, "rank 2 on b exited with status 7"),
        (IGNORES_TERM, "rank 0 on a exited with status 1"),
        (
            IGNORES_TERM.replace("b: tasks 2-3: Killed", "b: task 2: Segmentation fault"),
            "rank 2 on b was killed by SIGSEGV",
        ),
        (STEP_CANCELLED, "rank 0 on a was killed by SIGTERM"),
        (CRASH + ONE_FAILS, "rank 1 on a was killed by SIGSEGV"),
        # Slurm does not say which process was too large.
        (FULL, "the job ran out of memory on b"),
        (FULL.replace("slurmstepd-b:", "slurmstepd:"), "the job ran out of memory"),
        (
            "srun: error: b: task 2: Killed\n" + OOM_IN_CGROUP,
            "rank 3 on b was killed: out of memory",
        ),
        (OOM_KILL, "rank 3 on b was killed: out of memory"),
        (OOM_IN_CGROUP, "rank 3 on b was killed: out of memory"),
    ],
)
def test_the_first_cause(script: str, first: str) -> None:
    report = ending(SlurmState("FAILED", status=143), script).report()
    assert (report.exit_code, report.reason) == (1, first)


def test_a_task_of_the_services_is_not_that_of_the_main_step_with_its_number() -> None:
    file = FILE.replace("script: t.py", "script: t.py, success_policy: first_host")
    served = build(parse(file, "t.yaml")).on(("a", "b"))
    fails = f"{OF_SERVICES}srun: error: b: task 1: Exited with exit code 7\n"
    stops = "srun: launch/slurm: _step_signal: Terminating StepId=1.0\n"
    others = f"{OF_SERVICES}srun: error: b: task 0: Terminated\nsrun: error: a: tasks 0-1: Killed\n"
    (failure,) = failed_tasks(fails + stops + others, served, 5.0).values()
    assert failure.summary == "rank 3 on b exited with status 7"
    lost = f"{OF_SERVICES}srun: error: Node failure on b\n"
    assert ending(SlurmState("NODE_FAIL"), lost).report().reason == "Slurm ended job 12: b failed"


def test_the_words_of_the_script_explain_a_process_that_has_none() -> None:
    full = "/var/spool/job1/slurm_script: line 9: echo: write error: No space left on device\n"
    report = ending(SlurmState("FAILED", status=1), ONE_FAILS + full).report()
    assert report.problems == (full.strip(),)
    assert report.hint.startswith("a disk was full on that host\n")


UNNAMED = ["slurmstepd:", "[2026-11-28T16:47:53.246]", "[2026-11-28T16:47:53.246+01:00]"]
"""As daemons begin a line on most clusters: Debian's Slurm allows several on one machine, so they
name their host. Slurm 26.05 writes the time."""


def unnamed(script: str, begins: str) -> str:
    return script.replace("slurmstepd-a:", begins).replace("slurmstepd-b:", begins)


@pytest.mark.parametrize("begins", UNNAMED)
def test_a_daemon_that_does_not_name_its_host(begins: str) -> None:
    (failure,) = failed_tasks(unnamed(IGNORES_TERM, begins), plan(), 5.0).values()
    assert failure.rank == 0
    report = ending(SlurmState("FAILED", status=137), unnamed(FULL, begins)).report()
    assert "cluster.slurm.options: ['--mem=0']" in report.hint
    parts = unnamed(preempted("PREEMPTION"), begins) + "\nlast\n"
    assert of_attempt(parts, 2) == "last\n"


AGAIN = "dtrain: attempt 1 ended; the job goes back to the queue\n"


def test_each_attempt_has_its_part_of_the_output() -> None:
    script = f"{CRASH}{AGAIN}dtrain: attempt 2\n{ONE_FAILS}dtrain: attempt 3\nlast\n"
    parts = [of_attempt(script, number) for number in (1, 2, 3, 4)]
    assert parts == [CRASH + AGAIN, ONE_FAILS, "last\n", ""]
    assert latest_attempt(script) == 3
    assert of_attempt(CRASH + AGAIN, 2) == ""


def preempted(why: str) -> str:
    return f"slurmstepd-a: error: *** JOB 12 ON a CANCELLED AT 2026-01-01T00:00:00 DUE TO {why} ***"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (CRASH, "rank 1 on a was killed by SIGSEGV"),
        (preempted("PREEMPTION"), "job 12 was preempted by another job"),
        (
            preempted("NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"),
            "Slurm ended job 12: a machine failed",
        ),
        (f"dtrain: {PREEMPTED}\n", "job 12 was preempted by another job"),
        (f"dtrain: {TIME_LIMIT}\n{ONE_FAILS}", "job 12 reached its time limit"),
        (f"{preempted('JOB REQUEUE')}\n{CRASH}", "job 12 was put back in the queue outside dtrain"),
        (f"{CRASH}{AGAIN}{preempted('JOB REQUEUE')}", "rank 1 on a was killed by SIGSEGV"),
    ],
)
def test_why_a_job_starts_again(script: str, words: str) -> None:
    for said in (script, *(unnamed(script, begins) for begins in UNNAMED)):
        assert ending(SlurmState("PENDING"), said).before_restart().reason == words


def test_a_hang_says_where_the_workers_waited() -> None:
    hung = replace(ending(SlurmState("CANCELLED")), hang="no output", waits=("rank 0 waited",))
    for report in (hung.report(), hung.before_restart()):
        assert (report.reason, report.problems) == ("no output", ("rank 0 waited",))


def test_every_task_is_named_once() -> None:
    assert len(failed_tasks(FULL + FULL + HOSTILE, plan(), 5.0)) == 4


def test_tasks_that_slurm_ended_did_not_fail() -> None:
    (failure,) = failed_tasks(IGNORES_TERM, plan(), 5.0).values()
    assert failure.rank == 0


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [
        (SlurmState("COMPLETED"), 0, "all 4 workers finished"),
        (SlurmState("CANCELLED"), 1, "job 12 was cancelled outside dtrain"),
        (SlurmState("TIMEOUT", time_limit="1-00:00:00"), 1, "its time limit of 1-00:00:00"),
        (SlurmState("OUT_OF_MEMORY"), 1, "the job ran out of memory"),
        (SlurmState("NODE_FAIL"), 3, "Slurm ended job 12: a machine failed"),
        (SlurmState("PREEMPTED"), 3, "job 12 was preempted"),
        (SlurmState("FAILED", status=9), 1, "the job's script exited with status 9"),
        (SlurmState("FAILED", signal=9), 1, "the job's script was killed by signal 9"),
        (SlurmState("FAILED", signal=53), 1, "Slurm could not open the output file"),
        (None, 3, "Slurm no longer knows job 12"),
    ],
)
def test_each_state_has_its_words(state: SlurmState | None, code: int, words: str) -> None:
    report = ending(state).report()
    assert report.exit_code == code
    assert words in report.reason


@pytest.mark.parametrize("name", ["CANCELLED", "FAILED", "TIMEOUT"])
def test_who_asked_to_stop_is_named(name: str) -> None:
    report = ending(SlurmState(name), ONE_FAILS, stopped_by="Ctrl-C").report()
    assert (report.exit_code, report.reason) == (130, "Ctrl-C")


def test_what_the_script_said_before_it_started_a_process() -> None:
    script = "dtrain: the job needs 2 nodes, and the allocation has 3\n"
    assert ending(SlurmState("FAILED", status=1), script).report().problems == (script.strip(),)


def test_a_lost_machine_is_named_once() -> None:
    """By the step of the workers, and by that of the processes that serve them."""
    script = "srun: error: Node failure on b\n" * 2
    report = ending(SlurmState("NODE_FAIL"), script).report()
    assert report.reason == "Slurm ended job 12: b failed"
    assert report.hint.startswith("`sinfo --list-reasons` shows why\n")


def test_workers_stop_before_the_time_limit() -> None:
    """A job with a short limit ends long before it."""
    early = ending(SlurmState("FAILED", status=1), f"dtrain: {TIME_LIMIT}\n").report()
    assert "workers get TERM 70 s before the limit" in early.hint
    assert "TERM" not in ending(SlurmState("TIMEOUT")).report().hint


def test_a_prolog_that_fails() -> None:
    """Without a restart, Slurm cancels the job, and says why in its output."""
    script = "Error running slurm prolog: 1\n"
    assert ending(SlurmState("CANCELLED"), script).report().problems == (script.strip(),)


def test_a_forgotten_job_that_left_failures() -> None:
    report = ending(None, ONE_FAILS).report()
    assert (report.exit_code, report.reason) == (1, "rank 2 on b exited with status 7")
    # What its script wrote counts as for a job that Slurm knows.
    assert ending(None, FULL).report() == ending(SlurmState("FAILED"), FULL).report()
    near = ending(None, f"dtrain: {TIME_LIMIT}\n{ONE_FAILS}").report()
    assert near.reason == "job 12 reached its time limit"
