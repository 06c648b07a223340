"""Runs on this machine that outlive their terminal, their launcher, or a failure."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.runs import arrival_times
from dtrain.runs.events import NextAttempt
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import Journal
from dtrain.runs.record import Record
from dtrain.session.reporting.follow import RunFollower
from dtrain.session.reporting.observer import Observer
from support.launching import Launch, Scene, marked
from support.limits import HANG, until

COUNT = """
import os, sys, time
from pathlib import Path
from dtrain.runtime import progress
rank, stop = os.environ["RANK"], Path(sys.argv[1])
number = 0
while not stop.exists():
    number += 1
    print("line", number, flush=True)
    progress(number)
    time.sleep(0.01)
print("last", number, flush=True)
"""


class Runs:
    """A job that writes numbered lines until it is stopped."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.stop_file = scene.folder / "stop"
        self.file = scene.cluster_file(scene.script(COUNT), args=[str(self.stop_file)])

    def dtrain(self, *argv: str) -> Launch:
        return self.scene.command(*argv)

    def detach(self, *options: str) -> str:
        done = self.dtrain("launch", str(self.file), "--detach", *options).wait()
        assert done.code == 0, str(done)
        assert "4 workers started" in done.stderr
        return done.stdout.strip()

    def kill_launcher(self, run: str) -> None:
        pid = int((self.scene.home / "runs" / run / "launcher").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{pid}").exists(), "the launcher's end")

    def assert_whole(self, run: str) -> None:
        """Checks that the stored output has every number of every worker once, in order."""
        for host in ("node0", "node1"):
            for path in (self.scene.nodes / "nodes" / run / host).glob("worker-*.out"):
                written = path.read_bytes()
                here = self.scene.home / "runs" / run / "logs" / host / path.name
                assert here.read_bytes() == written
                *lines, last = written.decode().splitlines()
                numbers = [int(line.split()[1]) for line in lines]
                assert numbers == list(range(1, int(last.split()[1]) + 1))


@pytest.fixture
def runs(scene: Scene) -> Runs:
    return Runs(scene)


def test_a_detached_run_is_listed_shown_and_stopped(runs: Runs) -> None:
    run = runs.detach()
    listed = json.loads(runs.dtrain("ps", "--json").wait().stdout)["runs"]
    assert [(one["run"], one["state"], one["workers"]) for one in listed] == [(run, "running", 4)]
    shown = runs.dtrain("ps", run).wait().stdout
    assert re.search(r"node\[0-1] +running", shown)
    attached = runs.dtrain("attach", run)
    attached.until("line", count=20)
    attached.send(signal.SIGINT)
    done = attached.wait()
    assert done.code == 130
    assert "left the run; the job keeps running" in done.stderr
    followed = runs.dtrain("logs", "-f", "--rank", "2", run)
    followed.until("[node1 2] line 1\n")
    stopped = runs.dtrain("stop", run).wait()
    assert stopped.code == 0, str(stopped)
    assert followed.wait().code == 0
    assert "[node0 0]" not in followed.stdout
    assert runs.scene.leftovers() == []
    assert json.loads(runs.dtrain("ps", "--json").wait().stdout)["runs"][0]["state"] == "stopped"
    again = runs.dtrain("stop", run).wait()
    assert (again.code, "over already" in again.stderr) == (2, True)


def test_a_detached_run_exports_and_so_does_who_attaches(runs: Runs) -> None:
    files = [runs.scene.folder / name for name in ("launch.prom", "attach.prom")]
    run = runs.detach("--metrics-file", str(files[0]))
    attached = runs.dtrain("attach", run, "--metrics-file", str(files[1]))
    for file in files:
        step = f'dtrain_step{{run="{run}",rank="0"}}'
        until(
            lambda file=file, step=step: file.exists() and step in file.read_text(),
            "the first metrics",
        )
    runs.stop_file.touch()
    assert attached.wait().code == 0
    for file in files:
        until(lambda file=file: "goodput_ratio" in file.read_text(), "the last metrics")


def test_a_closed_terminal_does_not_end_a_detached_run(runs: Runs) -> None:
    run = runs.detach()
    # It has its own process group and session, so the terminal's signals do not reach it.
    pid = int((runs.scene.home / "runs" / run / "launcher").read_text().split()[0])
    assert os.getsid(pid) == pid
    runs.stop_file.touch()
    until(lambda: "done" in runs.dtrain("ps", run).wait().stdout, "the end of the job")
    runs.assert_whole(run)


@pytest.mark.parametrize("times", [1, 3])
def test_a_killed_launcher_loses_nothing(runs: Runs, times: int) -> None:
    run = runs.detach()
    runs.kill_launcher(run)
    for number in range(times):
        assert "unattended" in runs.dtrain("ps").wait().stdout
        attached = runs.dtrain("attach", run)
        attached.until("line", count=40)
        if number < times - 1:
            attached.process.kill()
            attached.wait()
    runs.stop_file.touch()
    done = attached.wait()
    assert done.code == 0, str(done)
    assert "all 4 workers finished" in done.stderr
    runs.assert_whole(run)
    assert runs.scene.leftovers() == []


def test_stop_ends_a_run_that_attach_is_in_charge_of(runs: Runs) -> None:
    run = runs.detach()
    runs.kill_launcher(run)
    attached = runs.dtrain("attach", run)
    attached.until("line", count=20)
    assert runs.dtrain("stop", run).wait().code == 0
    done = attached.wait()
    assert done.code == 130, str(done)
    assert "left the run" not in done.stderr
    assert "dtrain: stopped after " in done.stderr
    assert runs.scene.leftovers() == []


def test_status_of_a_run_without_a_launcher_comes_from_its_hosts(runs: Runs) -> None:
    run = runs.detach()
    runs.kill_launcher(run)
    shown = runs.dtrain("ps", run).wait()
    assert shown.code == 0, str(shown)
    assert re.search(r"node\[0-1] +running +for [\d min]+s +ranks 0-3 running\n", shown.stdout)

    (listed,) = json.loads(runs.dtrain("ps", run, "--json").wait().stdout)["runs"]
    worker = listed["hosts"]["node1"]["processes"][1]
    assert (worker["label"], worker["ended"]) == ("3", None)
    os.kill(worker["pid"], signal.SIGKILL)

    def said(pattern: str) -> bool:
        return re.search(pattern, runs.dtrain("ps", run).wait().stdout) is not None

    killed = r"rank 2 running; rank 3 killed by SIGKILL, [\d min]+s ago\n"
    until(lambda: said(killed), "its death")
    for supervisor in _supervisors(f"{run} node1"):
        os.kill(supervisor, signal.SIGKILL)
    until(lambda: said(r"node1 +gone .*its supervisor was killed\n"), "the supervisor's death")
    runs.stop_file.touch()
    ended = r"node0 +ended +for [\d min]+s +ranks 0-1 exited with status 0, [\d min]+s ago\n"
    until(lambda: said(ended), "the end of the job")
    shutil.rmtree(runs.scene.nodes / "nodes" / run / "node1")
    assert said(r"node1 +missing +\S+node1 does not exist\n")
    assert "unattended" in runs.dtrain("ps").wait().stdout


def test_attach_to_a_launch_killed_in_the_foreground(runs: Runs) -> None:
    launch = runs.dtrain("launch", str(runs.file))
    launch.until("line", count=20)
    launch.kill()
    (run,) = [path.name for path in (runs.scene.home / "runs").iterdir()]
    attached = runs.dtrain("attach", run[:8], "--rank", "1,3", "--host", "node0")
    attached.until("line", count=20)
    runs.stop_file.touch()
    done = attached.wait()
    assert (done.code, done.stdout.count("[node0 1]")) == (0, len(done.stdout.splitlines()))
    runs.assert_whole(run)


def test_of_two_watchers_the_remaining_one_takes_charge(runs: Runs) -> None:
    run = runs.detach()
    watchers = [runs.dtrain("attach", run) for _ in range(2)]
    for watcher in watchers:
        watcher.until("line", count=10)
    runs.kill_launcher(run)
    runs.stop_file.touch()
    for watcher in watchers:
        done = watcher.wait()
        assert done.code == 0, str(done)
    runs.assert_whole(run)
    late = runs.dtrain("attach", run).wait()
    assert (late.code, "done in" in late.stderr) == (0, True), str(late)


def test_stop_without_a_launcher(runs: Runs) -> None:
    run = runs.detach()
    runs.kill_launcher(run)
    stopped = runs.dtrain("stop", "--force", run).wait()
    assert stopped.code == 0, str(stopped)
    assert "killing the workers" in stopped.stderr and "TERM" not in stopped.stderr
    assert runs.scene.leftovers() == []
    assert "stopped" in runs.dtrain("ps", run).wait().stdout


def test_a_job_that_cannot_start_is_reported_before_detaching(runs: Runs) -> None:
    runs.file.write_text(runs.file.read_text().replace("script.py", "gone.py"))
    done = runs.dtrain("launch", str(runs.file), "--detach").wait()
    assert done.code == 3
    assert "gone.py does not exist" in " ".join(done.stderr.split())  # it may be wrapped


def test_unknown_runs(runs: Runs) -> None:
    for verb in ("attach", "logs", "stop", "ps"):
        done = runs.dtrain(verb, "nothing").wait()
        assert (done.code, "no run 'nothing'" in done.stderr) == (2, True), str(done)
    assert "no runs" in runs.dtrain("ps").wait().stdout


def test_since_leaves_out_old_output(runs: Runs) -> None:
    run = runs.detach()
    until(lambda: "line 1\n" in runs.dtrain("logs", run).wait().stdout, "the first line")
    runs.stop_file.touch()
    until(lambda: "done" in runs.dtrain("ps", run).wait().stdout, "the end of the job")
    assert "line 1\n" in runs.dtrain("logs", "--since", "1h", run).wait().stdout
    for stream in runs.scene.home.glob(f"runs/{run}/logs/*/*.*"):
        stream.with_name(f".{stream.name}.times").unlink(missing_ok=True)
        arrival_times.add(stream, 0, 0)
    assert runs.dtrain("logs", "--since", "1s", run).wait().stdout == ""


WAIT = "print('up', flush=True)\ntime.sleep(3600)\n"

RESTARTED = """
import os, sys
from pathlib import Path
from dtrain.runtime import progress
attempt, rank = int(os.environ["DTRAIN_ATTEMPT"]), os.environ["RANK"]
done = Path(sys.argv[1]) / f"checkpoint-{rank}"
step = int(done.read_text()) if done.exists() else 0
print("attempt", attempt, "from step", step, "on", os.environ["DTRAIN_HOST"], flush=True)
for step in range(step + 1, 7):
    if rank == "3" and step == 2 * attempt and attempt < 3:
        raise RuntimeError("out of luck")
    draft = done.with_suffix(".new")
    draft.write_text(str(step))
    draft.replace(done)
    progress(step, total=6)
print("trained", flush=True)
"""


def test_a_failed_job_resumes_where_it_was(scene: Scene) -> None:
    file = scene.cluster_file(scene.script(RESTARTED), args=[str(scene.folder)], restart={"max": 3})
    done = scene.run(file)
    assert done.code == 0, str(done)
    assert "dtrain: attempt 3 starts in 2 s" in done.stderr, "its reason was just shown"
    assert done.lines("node1", 3) == [
        "attempt 1 from step 0 on node1",
        "attempt 2 from step 1 on node1",
        "attempt 3 from step 3 on node1",
        "trained",
    ]
    folder = scene.run_folder()
    assert {path.name for path in folder.glob("logs*")} == {"logs", "logs-2", "logs-3"}
    assert "out of luck" in (folder / "logs-2" / "node1" / "worker-3.err").read_text()
    assert scene.leftovers() == []


def test_a_detached_job_restarts_and_all_its_attempts_are_followed_and_shown(scene: Scene) -> None:
    file = scene.cluster_file(scene.script(RESTARTED), args=[str(scene.folder)], restart={"max": 3})
    run = scene.command("launch", str(file), "--detach").wait().stdout.strip()
    followed = scene.command("logs", "-f", "--rank", "3", run).wait()
    assert followed.code == 0
    until(lambda: "done" in scene.command("ps", run).wait().stdout, "the end of the job")
    shown = scene.command("logs", "--rank", "3", run).wait().stdout
    for attempt in (1, 2, 3):
        assert f"attempt {attempt} from step" in followed.stdout
        assert f"attempt {attempt} from step" in shown


def test_a_new_launcher_knows_of_later_attempts(scene: Scene) -> None:
    script = scene.script(
        "import os, time\n"
        "print('attempt', os.environ['DTRAIN_ATTEMPT'], flush=True)\n"
        "time.sleep(3600 * (os.environ['DTRAIN_ATTEMPT'] == '2'))\n"
        "raise SystemExit(1)\n"
    )
    file = scene.cluster_file(script, restart={"max": 1})
    run = scene.command("launch", str(file), "--detach").wait().stdout.strip()
    watcher = scene.command("attach", run)
    # Its output is no sign: on a slow machine, the output came before it attached.
    folder = scene.home / "runs" / run
    until(lambda: [*folder.glob("logs-2/*/*.out")], "the second attempt")
    watcher.until(f"run {run}: 4 workers")
    os.kill(int((scene.home / "runs" / run / "launcher").read_text().split()[0]), signal.SIGKILL)
    watcher.until(f"run {run}: 4 workers", count=2)  # it is in charge now
    stopped = scene.command("stop", run).wait()
    assert stopped.code == 0, str(stopped)
    assert watcher.wait().code == 130
    assert scene.leftovers() == []
    assert "stopped" in scene.command("ps", run).wait().stdout


# The command, with an hour between two attempts.
PATIENT = """
import sys
from dtrain.runs import restart
restart.FIRST_DELAY = restart.MOST_DELAY = 3600.0
from dtrain_cli.app import main
main()
"""


def test_a_new_launcher_starts_an_attempt_that_was_not_started(scene: Scene) -> None:
    """The launcher is killed between two attempts, after it has recorded the second one."""
    script = scene.script(
        "import os\n"
        "attempt = int(os.environ['DTRAIN_ATTEMPT'])\n"
        "print('attempt', attempt, flush=True)\n"
        "raise SystemExit(attempt == 1)\n"
    )
    file = scene.cluster_file(script, restart={"max": 1})
    process = subprocess.Popen(
        [sys.executable, "-c", PATIENT, "launch", str(file)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "DTRAIN_HOME": str(scene.home)},
    )
    launch = scene.adopt(process)
    launch.until("attempt 2 starts in")
    launch.kill()
    folder = scene.run_folder()
    replace(Record.load(folder), attempt=2).save(folder)
    Journal(folder / "journal.jsonl").write(0.0, NextAttempt(2, ("node0", "node1")))
    done = scene.command("attach", folder.name).wait()
    assert done.code == 0, str(done)
    assert done.lines("node1", 3) == ["attempt 2"]
    assert scene.leftovers() == []


def test_a_host_that_knows_nothing_of_the_run_is_used_again(scene: Scene) -> None:
    script = scene.script(
        "import os, time\n"
        "print('attempt', os.environ['DTRAIN_ATTEMPT'], flush=True)\n"
        "time.sleep(3600 * (os.environ['DTRAIN_ATTEMPT'] == '1'))\n"
    )
    launch = scene.launch(scene.cluster_file(script, restart={"max": 1}))
    launch.until("attempt 1\n", count=4)
    launch.kill()
    folder = scene.run_folder()
    there = scene.nodes / "nodes" / folder.name / "node1"
    os.kill(json.loads((there / "supervisor").read_text())["pid"], signal.SIGKILL)
    shutil.rmtree(there)
    attached = scene.command("attach", folder.name).wait()
    assert attached.code == 0, str(attached)
    assert "node1: attaching to the job: no run" in attached.stderr
    assert attached.lines("node1", 3) == ["attempt 2"]
    assert scene.leftovers() == []


def test_a_watcher_sees_an_earlier_end(runs: Runs) -> None:
    run = runs.detach()
    runs.stop_file.touch()
    until(lambda: "done" in runs.dtrain("ps", run).wait().stdout, "the end of the job")
    folder = RunFolder(runs.scene.home / "runs" / run)
    follower = RunFollower(folder, Record.load(folder.path), Observer())
    follower.skip()
    assert follower.state.report is not None
    assert follower.state.report.exit_code == 0


def test_a_stopped_job_does_not_continue_under_a_new_launcher(scene: Scene) -> None:
    stubborn = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT
    file = scene.cluster_file(scene.script(stubborn), restart={"max": 3}, grace="20s")
    run = scene.command("launch", str(file), "--detach").wait().stdout.strip()
    folder = scene.home / "runs" / run
    # Workers that have started do not ignore the signal yet.
    until(lambda: [one.read_text() for one in folder.glob("logs/*/*.out")] == ["up\n"] * 4, "all")
    pid = int((folder / "launcher").read_text().split()[0])
    os.kill(pid, signal.SIGTERM)
    until(lambda: "stopping" in (folder / "journal.jsonl").read_text(), "it")
    os.kill(pid, signal.SIGKILL)
    until(lambda: "unattended" in scene.command("ps", run).wait().stdout, "the launcher's end")
    attached = scene.command("attach", run).wait()
    assert attached.code == 130, str(attached)
    assert scene.leftovers() == []


def test_malformed_reports_of_a_worker_are_harmless(scene: Scene) -> None:
    text = """
import os
from dtrain.runtime import progress
progress(float("inf"), **{f"metric{n}": n for n in range(99)})
with open(f"{os.environ['DTRAIN_RUN_DIR']}/rank-{os.environ['RANK']}.progress", "a") as file:
    print('"x"', '{"event": "progress", "metrics": []}', sep="\\n", file=file)
    print('"', "x" * (2 << 20), '"', sep="", file=file)
progress(7, total=7)
"""
    done = scene.run(scene.cluster_file(scene.script(text)))
    assert done.code == 0, str(done)
    assert "cannot be reached" not in done.stderr
    assert "step 7 of 7" in done.stderr


def test_a_job_that_is_done_is_not_run_again(scene: Scene) -> None:
    """Even if its supervisor dies in the final sweep."""
    text = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    time.sleep(3600)
"""
    file = scene.cluster_file(scene.script(text), restart={"max": 3}, grace="30s")
    launch = scene.launch(file)
    (run,) = _wait_for_run(scene)
    journal = scene.home / "runs" / run / "journal.jsonl"
    until(lambda: journal.exists() and journal.read_text().count('"exited"') == 4, "all ends")
    supervisors = [pid for pid, line in marked(scene.mark) if "dtrain-supervisor" in line]
    supervisors = supervisors or _supervisors(run)
    os.kill(supervisors[0], signal.SIGKILL)
    done = launch.wait()
    assert "attempt 2" not in done.stderr, str(done)
    assert scene.leftovers() == []


def _wait_for_run(scene: Scene) -> list[str]:
    runs = scene.home / "runs"
    until(lambda: runs.is_dir() and any(runs.iterdir()), "the run's folder")
    return [path.name for path in runs.iterdir()]


def _supervisors(run: str) -> list[int]:
    done = subprocess.run(["pgrep", "-f", f"dtrain-supervisor {run}"], capture_output=True)
    return [int(pid) for pid in done.stdout.split()]


def test_ctrl_c_while_waiting_for_the_next_attempt(scene: Scene) -> None:
    file = scene.cluster_file(scene.script("raise SystemExit(1)"), restart={"max": 9})
    launch = scene.launch(file)
    launch.until("attempt 3 starts")
    launch.send(signal.SIGINT)
    done = launch.wait()
    assert done.code == 130, str(done)
    assert scene.leftovers() == []


def test_a_script_that_never_began_is_not_restarted(scene: Scene) -> None:
    done = scene.launch(scene.cluster_file(scene.script("def f(:"), restart={"max": 9})).wait()
    assert done.code == 1
    why = "it would fail again: the Python of that host cannot parse the script"
    assert f"not restarted: {why}" in done.stderr


def test_a_detached_launch_asks_on_the_terminal_first(runs: Runs) -> None:
    """A detached launch keeps neither the terminal nor the pipe of its start."""
    command = [sys.executable, "-m", "dtrain_cli", "launch", str(runs.file), "--detach"]
    environment = {**os.environ, "DTRAIN_HOME": str(runs.scene.home)}
    output = subprocess.run(command, env=environment, capture_output=True, timeout=HANG)
    assert output.returncode == 0
    runs.stop_file.touch()
