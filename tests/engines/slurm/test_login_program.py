"""The program on the login node: it submits a run once, and asks the controller seldom."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from dtrain.engines.slurm.submission import hint_for
from dtrain.node.agent.processes import processes
from dtrain.node.slurm import commands, main, watchers
from dtrain.node.slurm.allocated import AllocationScript
from dtrain.node.slurm.commands import BatchJob, CommandResult
from dtrain.node.slurm.main import StateWatch
from support.limits import until
from support.other_users import MALLORY, folder_of, scratch


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a shell script on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()

    def write(name: str, text: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    return write


def order(tmp_path: Path, script: str = "") -> Any:
    return {
        "trust_group": None,
        "workdir": str(tmp_path),
        "script": script,
        "options": ["--partition=gpu"],
        "runtime": "",
        "environment": {},
        "hidden": [],
    }


def test_two_programs_submit_a_run_once(tmp_path: Path, program: Any) -> None:
    """The second one is that of a new connection, while the first one still submits."""
    program("sbatch", f"echo sbatch >>{tmp_path}/calls; echo 7")
    folder = os.fsencode(tmp_path / "run")
    first, second = BatchJob("run", folder), BatchJob("run", folder)
    for job in (first, second):
        assert job.find().status == 0 and not job.number
    for job in (first, second):
        assert job.submit(order(tmp_path)).status == 0
        assert job.number == "7"
    assert (tmp_path / "calls").read_text() == "sbatch\n"


def test_another_shell_asks_the_cluster_of_the_job(
    tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one Slurm has several clusters, each has its own job numbers."""
    program("sbatch", 'echo "7;${SLURM_CLUSTERS%,*}"')
    program("scontrol", 'echo "JobState=RUNNING $SLURM_CLUSTERS"')
    folder = os.fsencode(tmp_path / "run")
    monkeypatch.setenv("SLURM_CLUSTERS", "east,west")
    assert BatchJob("run", folder).submit(order(tmp_path)).status == 0
    monkeypatch.delenv("SLURM_CLUSTERS")
    again = BatchJob("run", folder)
    assert (again.number, again.describe().text) == ("7", "JobState=RUNNING east")


def test_a_submitted_job_whose_number_cannot_be_saved(tmp_path: Path, program: Any) -> None:
    program("sbatch", "echo 7")
    (tmp_path / "run" / "job-id").mkdir(parents=True)
    job = BatchJob("run", os.fsencode(tmp_path / "run"))
    assert job.submit(order(tmp_path)).status == 0
    assert job.number == "7"


def test_a_full_disk_is_named_by_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(commands, "write_all", full)
    for kind in (BatchJob, lambda run, folder: AllocationScript(run, folder, "5")):
        answer = kind("run", os.fsencode(tmp_path / "run")).submit(order(tmp_path))
        assert (answer.command, answer.text) == ("", f"{tmp_path}/run: No space left on device")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other users")
def test_another_user_who_made_the_folder_of_runs_gets_no_script(
    tmp_path: Path, program: Any
) -> None:
    program("sbatch", "echo 7")
    nodes = folder_of(MALLORY, scratch(tmp_path / "scratch") / "nodes")
    for kind in (BatchJob, lambda run, folder: AllocationScript(run, folder, "5")):
        answer = kind("run", os.fsencode(nodes / "run")).submit(order(tmp_path))
        assert answer.text == f"{nodes}: belongs to bin, not to you or root (mode 0777)"
        assert answer.hint == "choose another `cluster.run_dir`"
    assert list(nodes.iterdir()) == []


@pytest.mark.parametrize(
    ("saved", "state"),
    [("7", "JobState=FAILED ExitCode=7:0"), ("0", "JobState=COMPLETED ExitCode=0:0"), ("", "")],
)
def test_the_end_of_a_job_that_slurm_has_forgotten(
    tmp_path: Path, program: Any, saved: str, state: str
) -> None:
    program("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    job = BatchJob("run", os.fsencode(tmp_path))
    job.save(b"status", saved.encode())
    answer = job.describe()
    assert (answer.status, answer.text) == (0, state)


def test_a_cluster_that_takes_no_more_jobs(
    tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch tries again for two minutes."""
    said = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying"
    program("sbatch", f"echo {said} >&2; exec sleep 500")
    program("squeue", "")
    monkeypatch.setattr(commands, "LIMIT", 1.0)
    refused = BatchJob("run", os.fsencode(tmp_path / "run")).submit(order(tmp_path))
    assert refused.text == f"no answer within 1 s: {said}"
    assert "MaxJobCount" in hint_for(refused.text, "login01")


def test_a_job_that_sbatch_has_submitted_although_it_failed(
    tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the controller does not answer for some seconds, and reads the request later."""
    program("sbatch", "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1")
    job = BatchJob("run", os.fsencode(tmp_path / "run"))
    assert job.submit(order(tmp_path)).uncertain
    calls = f"echo x >>{tmp_path}/calls; case $(wc -l <{tmp_path}/calls) in"
    program("squeue", f"{calls} 1) echo down >&2; exit 1 ;; 2) ;; *) echo 7 ;; esac")
    monkeypatch.setattr(main, "LAST_LOOK", 0.0)
    troubles: list[CommandResult] = []
    main.find_late(job, troubles.append, patient=True)
    assert (job.number, [one.text for one in troubles]) == ("7", ["down"])
    program("sbatch", "echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1")
    assert not BatchJob("other", os.fsencode(tmp_path / "other")).submit(order(tmp_path)).uncertain


@pytest.mark.parametrize("op", ["submit", "follow"])
def test_a_job_is_looked_for_late_if_the_program_that_submitted_it_is_gone(
    tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """As when the connection breaks while the program looks for a job after an uncertain end of
    sbatch: another submission might run a second copy."""
    program("sbatch", f"echo sbatch >>{tmp_path}/calls; echo 'Socket timed out' >&2; exit 1")
    folder = os.fsencode(tmp_path / "nodes" / "run")
    for _ in range(2):  # the launcher may ask again before the program has found the job
        assert BatchJob("run", folder).submit(order(tmp_path)).uncertain
    program("squeue", f"echo x >>{tmp_path}/looks; [ $(wc -l <{tmp_path}/looks) -lt 3 ] || echo 7")
    monkeypatch.setattr(main, "LAST_LOOK", 0.0)
    reports: list[tuple[str, Any]] = []

    class Channel:
        def report(self, kind: str, **body: Any) -> None:
            reports.append((kind, body))
            if kind == "submitted":
                raise EOFError

    channel: Any = Channel()
    first: Any = {**order(tmp_path), "op": op, "run": "run", "run_dir": str(tmp_path), "job": None,
                  "allocation": None}  # fmt: skip
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    reader, writer = os.pipe()
    with open(reader, "rb") as orders:
        with open(writer, "wb"), pytest.raises(EOFError):
            main.JobRelay(orders, channel, None).serve(first)  # type: ignore[arg-type]
        until(lambda: left == [0])
    assert reports == [("submitted", {"job": "7", "uncertain": True})]
    assert (tmp_path / "calls").read_text() == "sbatch\n"


def test_variables_that_give_options_do_not_reach_the_commands(
    tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sbatch", "scancel", "squeue"):
        program(name, f"env >{tmp_path}/{name}; echo 7")
    removed = ["SBATCH_EXPORT", "SCANCEL_STATE", "SLURM_MEM_PER_CPU", "SQUEUE_USERS"]
    kept = ["SBATCH_ACCOUNT", "SLURM_CONF"]
    for name in (*removed, *kept):
        monkeypatch.setenv(name, "x")
    job = BatchJob("run", os.fsencode(tmp_path / "run"))
    assert job.submit(order(tmp_path)).status == 0
    assert job.cancel(kill=False).status == 0
    assert job.fail(restart=True).status == 0
    for name in ("sbatch", "scancel", "squeue"):
        found = {line.partition("=")[0] for line in (tmp_path / name).read_text().splitlines()}
        assert not found & {*removed} and found >= {*kept}, name


def test_a_script_in_an_allocation_is_started_once_and_leaves_nothing(tmp_path: Path) -> None:
    """TERM ends this script before it can end its step."""
    script = f"echo begun >>{tmp_path}/calls; mkfifo fifo; sleep 500 & echo up >fifo; wait"
    folder = os.fsencode(tmp_path / "run")
    first, second = AllocationScript("run", folder, "5"), AllocationScript("run", folder, "5")
    for job in (first, second):
        job.find()
        assert not job.number
    for job in (first, second):
        assert job.submit(order(tmp_path, script)).status == 0
        assert job.number == "5"
    shell = int(first.saved(b"process").split(" ")[1])
    until((tmp_path / "fifo").exists)
    assert (tmp_path / "fifo").read_text() == "up\n"
    assert first.cancel(kill=False).status == 0
    os.waitpid(shell, 0)
    assert first.saved(b"status") == "143"
    assert (tmp_path / "calls").read_text() == "begun\n"
    until(lambda: not [one for one in processes().values() if one.pgrp == shell and one.alive])


def test_a_script_in_an_allocation_that_cannot_be_started(tmp_path: Path) -> None:
    (tmp_path / "run" / "process.new").mkdir(parents=True)
    job = AllocationScript("run", os.fsencode(tmp_path / "run"), "5")
    answer = job.submit(order(tmp_path))
    assert answer.status and "process.new: Is a directory" in answer.text


def test_the_run_time_of_a_job_is_no_news() -> None:
    """Otherwise the controller would be asked once a second, for as long as the job runs."""

    class Job:
        asked = 0

        def describe(self) -> CommandResult:
            self.asked += 1
            if self.asked > 3:
                raise EOFError
            watch.hurry()
            return CommandResult("", 0, f"JobState=RUNNING RunTime=00:00:0{self.asked} Restarts=0")

    job: Any = Job()
    watch = StateWatch(job)
    with pytest.raises(EOFError):
        watch.run()
    assert watch.answers.qsize() == 1


def test_watchers_that_cannot_start_leave_no_threads(
    monkeypatch: pytest.MonkeyPatch, program: Any
) -> None:
    program("srun", "exit 1")
    monkeypatch.setattr(watchers, "FIRST_START", 0.0)
    monkeypatch.setattr(watchers, "AGAIN", 0.0)
    watch: Any = {"nodes": 1, "start": "", "folder": "", "world_size": 1}
    channel: Any = type("Channel", (), {"report": lambda *_, **__: None})()
    importer: Any = type("Importer", (), {"modules": {}})()
    one = watchers.Watchers(watch, importer, channel)
    before = set(threading.enumerate())
    ended: list[None] = []
    one.on_end = lambda: ended.append(None)
    for count in (1, 2, 3):
        one.poll("5")
        until(lambda count=count: len(ended) == count)
    until(lambda: set(threading.enumerate()) <= before)
