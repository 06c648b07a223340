"""How runs on Slurm end, where Slurm itself ends them, or cannot start them."""

from __future__ import annotations

import json
import re
import signal
import sys

import pytest

from support.cluster import Launcher
from support.disks import disk, fill
from support.launching import Launch
from support.limits import until
from support.slurm import Slurm, WriteJob, config_for_login

pytestmark = [pytest.mark.slurm, pytest.mark.netns]

WAIT = """\
import os, sys, time
print("up", flush=True)
time.sleep(500)
"""


def test_what_fails_before_the_program_starts_is_shown(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> None:
    done = launcher.run(write_job("", setup=["cd /no/such/folder"]), env=slurm.environment)
    assert done.code == 1, str(done)
    report = done.stderr.partition("\nerror: rank ")[2]
    assert "cd: /no/such/folder: No such file or directory" in report
    output = rf"^\[{slurm.nodes[0].name} 0\] \S+: line \d+: cd: /no/such/folder: "
    assert re.search(output, done.stderr, re.MULTILINE), "it is output of the process"
    assert "hint: it cannot enter the folder /no/such/folder on that host" in done.stderr


def test_a_job_that_can_never_start_is_not_submitted(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> None:
    cluster = {"slurm": {}, "nodes": 9, "gpus": 0, "python": sys.executable}
    done = launcher.run(write_job("", cluster=cluster), env=slurm.environment)
    assert done.code == 3, str(done)
    assert "partition gpu has 4 machines, and the job asks for 9" in done.stderr
    assert "error: not started: the check found 1 error" in done.stderr
    assert "is submitted" not in done.stderr


def test_a_job_above_the_limit_of_its_partition_waits_aloud(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> None:
    """A QOS might lift the limit."""
    cluster = {"slurm": {"time": "61m"}, "nodes": 1, "gpus": 0, "python": sys.executable}
    launch = launcher.start(write_job("", cluster=cluster), env=slurm.environment)
    launch.until("1h1m is more than the limit of partition gpu")
    launch.until("is queued: it asks for more time than the partition allows; cancel it, and set")
    launch.send(signal.SIGINT)
    assert launch.wait().code == 130


def test_a_controller_that_does_not_answer_is_waited_for_aloud(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> None:
    file = write_job("print('trained')")
    with slurm.silent_controller():
        launch = launcher.command("launch", str(file), "--no-check", env=slurm.impatient)
        launch.until("waiting for Slurm on this machine to answer")
        # The controller reads the request later.
        launch.until("Socket timed out on send/recv operation; the job may be submitted")
    done = launch.wait()
    assert done.code == 0, str(done)
    assert done.stdout.count("] trained") == 4


def test_a_terminal_that_is_closed_during_the_submission_leaves_no_job(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> None:
    file = write_job(WAIT)
    with slurm.silent_controller():
        launch = launcher.command("launch", str(file), "--no-check", env=slurm.impatient)
        launch.until("waiting for Slurm on this machine to answer")
        launch.send(signal.SIGHUP)
        launch.until("its terminal was closed: cancelling the job once Slurm says that it exists")
        launch.until("the job may be submitted, trying again")
    assert launch.wait().code == 130
    assert slurm.run("squeue", "--noheader") == ""


def test_a_job_for_a_partition_that_is_down_waits_until_it_is_up(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> None:
    slurm.run("scontrol", "update", "partitionname=gpu", "state=down")
    try:
        launch = launcher.start(write_job('print("trained")'), env=slurm.environment)
        launch.until("is queued: the partition is down")
    finally:
        slurm.run("scontrol", "update", "partitionname=gpu", "state=up")
    assert launch.wait().code == 0
    assert "] trained" in launch.stdout


def test_a_refused_job_is_reported_with_the_words_of_sbatch(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> None:
    file = write_job("", slurm={"partition": "nope"})
    done = launcher.command("launch", str(file), "--no-check", env=slurm.environment).wait()
    assert done.code == 3, str(done)
    words = "sbatch: error: invalid partition specified: nope"
    assert f"error: not submitted: {words}" in done.stderr
    (command,) = re.findall(r"ended with status 1: (sbatch .*\.sbatch)$", done.stderr, re.M)
    assert command.count("--job-name=") == command.count("--output=") == 1
    assert "hint: `sinfo` lists the partitions" in done.stderr


def test_a_queued_job_says_why_and_can_be_cancelled(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> None:
    first = slurm.submit("#!/bin/sh\nsleep 500\n", f"--nodes={len(slurm.nodes)}", "--exclusive")
    slurm.wait(first, "RUNNING")
    launch = launcher.start(write_job(WAIT), env=slurm.environment)
    launch.until("is queued: waiting for free machines (Resources)")
    (run,) = json.loads(launcher.command("ps", "--json").wait().stdout)["runs"]
    job = slurm.run("squeue", "--noheader", "--states=PENDING", "--format=%i")
    assert run["job"] == job
    assert f"job      {job}\n" in launcher.command("ps", run["run"]).wait().stdout
    assert (run["state"], run["hosts_known"]) == ("queued", False)
    launch.process.send_signal(signal.SIGINT)
    assert launch.wait().code == 130


def test_cancelled_from_outside(slurm: Slurm, launcher: Launcher, write_job: WriteJob) -> None:
    launch = launcher.start(write_job(WAIT), env=slurm.environment)
    launch.until("] up", count=4)
    slurm.run("scancel", "--user=root")
    done = launch.wait()
    assert done.code == 1, str(done)
    assert "was cancelled outside dtrain" in done.stderr


def test_a_node_fails(slurm: Slurm, launcher: Launcher, write_job: WriteJob) -> None:
    launch = launcher.start(write_job(WAIT), env=slurm.environment)
    launch.until("] up", count=4)
    lost = slurm.nodes[1]
    slurm.fail_node(lost)
    done = launch.wait()
    assert done.code == 3, str(done)
    assert f": {lost.name} failed" in done.stderr
    (run,) = (launcher.home / "runs").iterdir()
    shown = launcher.command("ps", run.name, env=slurm.environment).wait()
    assert re.search(rf"{lost.name} +lost ", shown.stdout), str(shown)


def test_the_job_runs_out_of_memory(slurm: Slurm, launcher: Launcher, write_job: WriteJob) -> None:
    program = "import os, time\nx = bytearray(10**9) if os.environ['RANK'] == '1' else 0\n"
    file = write_job(program + "time.sleep(500)", slurm={"options": ["--mem=300"]})
    done = launcher.run(file, env=slurm.environment)
    assert done.code == 1, str(done)
    # Slurm does not say that it was rank 1, and newer versions do not name the node.
    where = rf"( on {slurm.nodes[0].name})?$"
    assert re.search(f"^error: the job ran out of memory{where}", done.stderr, re.MULTILINE)
    assert "cluster.slurm.options: ['--mem=0']" in done.stderr


def test_the_time_limit(slurm: Slurm, launcher: Launcher, write_job: WriteJob) -> None:
    # With such a limit, the warning comes as soon as Slurm looks at the job.
    file = write_job(WAIT, slurm={"time": "1m"}, grace="55s")
    done = launcher.run(file, env=slurm.environment)
    assert done.code == 1, str(done)
    assert "reached its time limit of 00:01:00" in done.stderr
    assert "hint: set a longer cluster.slurm.time" in done.stderr


def test_a_job_that_fails_while_the_controller_is_away_starts_again(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> None:
    program = """\
import os, sys, time
print("up", flush=True)
while not os.path.exists(__file__.replace("program.py", "go")):
    time.sleep(0.1)
sys.exit(7)
"""
    launch = launcher.start(write_job(program, restart={"max": 1}), env=slurm.environment)
    node = slurm.nodes[0]

    def waits() -> bool:
        """The script waits before it asks the controller again. With Slurm 26.05, its `srun` does
        not end without the controller."""
        log = (slurm.folder / f"slurmd-{node.name}.log").read_text()
        return "sleep 5" in node.processes().values() or "directly to slurmctld, retrying" in log

    launch.until("] up", count=4)
    slurm.stop_controller()
    try:
        (launcher.folder / "go").touch()
        until(waits, "the script")
    finally:
        slurm.start_controller()
    launch.until("is queued again (restart 1)")
    launch.process.send_signal(signal.SIGINT)
    assert launch.wait().code == 130


@pytest.mark.parametrize(
    ("status", "code", "words"), [(0, 0, "all 4 workers finished"), (7, 1, "exited with status 7")]
)
def test_a_job_that_slurm_has_forgotten(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob, status: int, code: int, words: str
) -> None:
    """Its script has saved its status."""
    program = f"""\
import os, sys, time
print("up", flush=True)
while not os.path.exists(__file__.replace("program.py", "go")):
    time.sleep(0.1)
sys.exit({status})
"""
    launch = launcher.start(write_job(program), env=slurm.environment)
    launch.until("] up", count=4)
    launch.kill()
    (run,) = (launcher.home / "runs").iterdir()
    number = json.loads((run / "run.json").read_text())["job_id"]
    (launcher.folder / "go").touch()
    slurm.wait(number)
    slurm.forget()
    shown = launcher.command("ps", run.name, env=slurm.environment).wait()
    assert re.search(r"^node\[2-3\] +ended ", shown.stdout, re.MULTILINE), str(shown)
    done = launcher.command("attach", run.name, env=slurm.environment).wait()
    assert done.code == code, str(done)
    assert words in done.stdout + done.stderr


def test_a_login_node_over_ssh(slurm: Slurm, launcher: Launcher, write_job: WriteJob) -> None:
    """It gets the files of ``sync``, and starts the commands of ``dtrain exec``."""
    config_for_login(slurm, launcher)
    go = slurm.shared / "go"
    go.unlink(missing_ok=True)
    program = f"""\
import os, pathlib, time
print("up in", pathlib.Path("name").read_text(), flush=True)
while not os.path.exists({str(go)!r}):
    time.sleep(0.1)
"""
    files = launcher.folder / "files"
    files.mkdir()
    file = write_job(
        program,
        slurm={"login": "login01"},
        sync={"source": "files"},
        workdir=str(slurm.shared / "code"),
    )
    (files / "name").write_text("code")
    launch = launcher.start(file)
    launch.until("sent 1 file (4 B) to login01")
    launch.until("] up in code\n", count=4)
    (run,) = (launcher.home / "runs").iterdir()
    done = launcher.command("exec", run.name, "--no-fold", "--", f"hostname; touch {go}").wait()
    assert done.code == 0, str(done)
    names = [host.name for host in slurm.nodes[:2]]
    assert sorted(done.stdout.splitlines()) == [f"[{name}] {name}" for name in names]
    done = launch.wait()
    assert done.code == 0, str(done)
    assert slurm.run("squeue", "--noheader") == ""


def before_sbatch(slurm: Slurm, script: str) -> None:
    """Each submission on the login node runs ``script`` first."""
    wrapper = slurm.login.home / "bin" / "sbatch"
    wrapper.parent.mkdir(exist_ok=True)
    # The check before the submission does not run it.
    wrapper.write_text(
        f'#!/bin/bash\n[ "$1" = --test-only ] || {{ {script}; }}\nexec /usr/bin/sbatch "$@"\n'
    )
    wrapper.chmod(0o755)
    (slurm.login.home / ".bashrc").write_text("PATH=~/bin:$PATH\n")


def test_a_connection_breaks_during_the_submission(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> None:
    """The job is submitted once, and followed."""
    config_for_login(slurm, launcher)
    before_sbatch(slurm, "echo $PPID >>~/began; while [ ! -e ~/go ]; do sleep 0.05; done")
    began = slurm.login.home / "began"
    launch = launcher.start(write_job("print('up')", slurm={"login": "login01"}))
    until(began.exists, "sbatch")
    slurm.login.run("pkill", "-f", "^sshd(-session)?: root@notty")
    launch.until("the job may be submitted, connecting again")
    (slurm.login.home / "go").touch()
    done = launch.wait()
    assert done.code == 0, str(done)
    assert done.stdout.count("] up") == 4
    assert len(began.read_text().split()) == 1


TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.mark.parametrize("breaks", [True, False])
def test_a_job_that_slurm_accepts_late(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob, breaks: bool
) -> None:
    """Also if the connection breaks meanwhile, it is submitted once, and followed. If it comes too
    late for that, `dtrain stop` ends it."""
    config_for_login(slurm, launcher)
    late = slurm.login.home / "late"
    late.unlink(missing_ok=True)
    save = '{ printf "HOME=%q " ~; printf "%q " sbatch "$@"; echo; } >>~/late'
    before_sbatch(slurm, f"{save}; echo '{TIMED_OUT}' >&2; exit 1")
    launch = launcher.start(write_job(WAIT, slurm={"login": "login01"}))
    launch.until(f"{TIMED_OUT}; the job may be submitted")
    (run,) = (launcher.home / "runs").iterdir()
    if breaks:
        slurm.login.run("pkill", "-f", "^sshd(-session)?: root@notty")
        launch.until("the job may be submitted, connecting again")
        launch.until("waiting for Slurm on login01 to answer")
        slurm.run("bash", str(late))
        launch.until("] up", count=4)
        launch.send(signal.SIGINT)
        assert launch.wait().code == 130
    else:
        done = launch.wait()
        assert done.code == 3, str(done)
        assert f"`squeue --name={run.name}` shows it" in done.stderr
        slurm.run("bash", str(late))
        stopped = launcher.command("stop", run.name).wait()
        assert "no processes are left" in stopped.stderr, str(stopped)
    assert len(late.read_text().splitlines()) == 1
    assert slurm.run("squeue", "--noheader") == ""


def interrupted_without_controller(slurm: Slurm, launcher: Launcher, write_job: WriteJob) -> Launch:
    """A job that runs, after the first Ctrl-C, which its controller has not seen."""
    launch = launcher.start(write_job(WAIT), env=slurm.impatient)
    launch.until("] up", count=4)
    slurm.stop_controller()
    launch.process.send_signal(signal.SIGINT)
    launch.until("Unable to contact slurm controller")
    return launch


def test_a_cancellation_waits_for_the_controller(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> None:
    launch = interrupted_without_controller(slurm, launcher, write_job)
    slurm.start_controller()
    done = launch.wait()
    assert done.code == 130, str(done)
    said = re.findall(".*the job goes on, trying again", done.stderr)
    assert said
    assert len(said) == len(set(said))
    assert "hint: the controller is down or cannot be reached" in done.stderr
    assert "this machine: Slurm answers again" in done.stderr


def test_a_job_that_was_given_up_can_be_stopped_later(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> None:
    launch = interrupted_without_controller(slurm, launcher, write_job)
    launch.process.send_signal(signal.SIGINT)
    launch.until("killing its processes")
    launch.process.send_signal(signal.SIGINT)
    done = launch.wait()
    assert done.code == 130, str(done)
    (run,) = (launcher.home / "runs").iterdir()
    assert f"hint: `dtrain stop {run.name}` tries again" in done.stderr
    slurm.start_controller()
    stopped = launcher.command("stop", run.name, env=slurm.environment).wait()
    assert stopped.code == 0, str(stopped)
    assert "no processes are left" in stopped.stderr
    assert slurm.run("squeue", "--noheader") == ""
    again = launcher.command("stop", run.name, env=slurm.environment).wait()
    assert "is over already" in again.stderr


def test_a_full_disk_here_leaves_the_job(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> None:
    """The rest of its output can be fetched once there is space again."""
    more, end = launcher.folder / "more", launcher.folder / "end"
    program = f"""\
import os, time
print("up", flush=True)
for go in ({str(more)!r}, {str(end)!r}):
    while not os.path.exists(go):
        time.sleep(0.1)
    for number in range(2000):
        print("line", number, flush=True)
"""
    with disk(launcher.home, "4M"):
        launch = launcher.start(write_job(program), env=slurm.environment)
        launch.until("] up", count=4)
        ballast = fill(launcher.home)
        more.touch()
        done = launch.wait()
        assert done.code == 3, str(done)
        assert "cannot store the run's files: No space left on device" in done.stderr
        assert "left the run; the job keeps running: `dtrain attach" in done.stderr
        (run,) = json.loads(launcher.command("ps", "--json").wait().stdout)["runs"]
        assert run["state"] not in ("done", "failed", "stopped")
        ballast.unlink()
        end.touch()
        done = launcher.command("attach", run["run"], env=slurm.environment).wait()
        assert done.code == 0, str(done)
        logs = launcher.command("logs", run["run"]).wait().stdout
        assert logs.count("line 1999\n") == 8


def test_a_full_disk_here_does_not_keep_a_job_from_being_stopped(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> None:
    go = launcher.folder / "go"
    program = f"""\
import os, time
print("up", flush=True)
while True:
    time.sleep(0.01)
    if os.path.exists({str(go)!r}):
        print("x" * 1000, flush=True)
"""
    with disk(launcher.home, "4M"):
        launch = launcher.start(write_job(program), env=slurm.environment)
        launch.until("] up", count=4)
        fill(launcher.home)
        go.touch()
        assert launch.wait().code == 3
        (run,) = (launcher.home / "runs").iterdir()
        done = launcher.command("stop", run.name, env=slurm.environment).wait()
        assert done.code == 0, str(done)
        assert "is cancelled; nothing of it runs" in done.stderr


def test_a_hostile_folder_and_setup(slurm: Slurm, launcher: Launcher, write_job: WriteJob) -> None:
    """The job has the umask of the user, and nothing in its folder is for others."""
    run_dir = launcher.folder / "a%j \\b'\"$x"
    cluster = {"slurm": {}, "nodes": 2, "gpus": 2, "python": sys.executable}
    file = write_job(
        "import os\nprint(f'umask {os.umask(0):o}')",
        cluster={**cluster, "run_dir": str(run_dir)},
        setup=['head -c 100000 /dev/urandom >>"$DTRAIN_RUN_DIR"/../job.out'],
    )
    done = launcher.run(file, env=slurm.environment)
    assert done.code == 0, str(done)
    assert done.stdout.count("] umask 22") == 4
    (folder,) = (run_dir / "nodes").iterdir()
    assert (folder / "job.out").stat().st_size > 100_000
    assert [one.stat().st_mode & 0o777 for one in (run_dir, folder)] == [0o700] * 2


def test_a_job_that_fails_is_queued_again(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> None:
    program = """\
import os, time
attempt = os.environ["DTRAIN_ATTEMPT"]
print("attempt", attempt, flush=True)
if os.environ["RANK"] == "2":
    if attempt == "2":
        os._exit(7)
    raise ValueError(f"failed in attempt {attempt}")
time.sleep(500)
"""
    notify = {"command": ["sh", "-c", "cat >>notified; echo >>notified"]}
    file = write_job(program, restart={"max": 1}, notify=notify)
    launch = launcher.start(file, env=slurm.environment)
    again = f"rank 2 on {slurm.nodes[1].name} exited with status 1; job "
    launch.until(again)
    launch.until("is queued again (restart 1)")
    launch.until("waiting for its begin time (BeginTime)")
    (run,) = (launcher.home / "runs").iterdir()
    number = json.loads((run / "run.json").read_text())["job_id"]
    slurm.start_again(number)
    done = launch.wait()
    assert done.code == 1, str(done)
    assert " 2] attempt 2\n" in done.stdout  # the others may end before they print
    report = done.stderr.partition("\nerror: ")[2]
    assert report.startswith(f"rank 2 on {slurm.nodes[1].name} exited with status 7")
    assert "failed in attempt 1" not in report
    for attempt, logs in (("1", run / "logs"), ("2", run / "logs-2")):
        written = {path.read_text() for path in logs.rglob("*.out")}
        assert written - {""} == {f"attempt {attempt}\n"}  # some end before they print
    lines = (launcher.folder / "notified").read_text().splitlines()
    sent = [(said["event"], said["attempt"]) for said in map(json.loads, lines)]
    assert sent == [("restarted", 1), ("failed", 2)]


def test_a_rank_that_ended_early_is_named(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> None:
    """Each attempt has its own ends."""
    program = """\
import os, time
rank, attempt = int(os.environ["RANK"]), os.environ["DTRAIN_ATTEMPT"]
early = [0, 1] if attempt == "1" else [0]
if rank in early:
    open(f"{__file__}.{attempt}.{rank}", "w").close()
    raise SystemExit
while not all(os.path.exists(f"{__file__}.{attempt}.{other}") for other in early):
    time.sleep(0.05)
time.sleep(2 if rank < 3 else 500)
raise ConnectionError("Connection closed by peer")
"""
    file = write_job(program, framework="torch", restart={"max": 1})
    launch = launcher.start(file, env=slurm.environment)
    launch.until("is queued again (restart 1)")
    (run,) = (launcher.home / "runs").iterdir()
    number = json.loads((run / "run.json").read_text())["job_id"]
    slurm.start_again(number)
    done = launch.wait()
    assert done.code == 1, str(done)
    first, second = (node.name for node in slurm.nodes[:2])
    report = done.stderr.partition("\nerror: ")[2]
    assert re.match(f"rank (1 on {first}|2 on {second}) exited with status 1\n", report), report
    assert f"rank 0 on {first} had already ended, with status 0\n" in report
    assert "hint: some ranks ended while others still needed them\n" in report


def test_a_job_that_is_requeued_from_outside(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> None:
    """As an administrator does before maintenance. The report has the machines' names alone."""
    launch = launcher.start(write_job(WAIT, restart={"max": 1}), env=slurm.environment)
    launch.until("] up", count=4)
    number = slurm.run("squeue", "--noheader", "--format=%i")
    slurm.run("scontrol", "requeue", number)
    launch.until(f"job {number} was put back in the queue outside dtrain; job {number} is queued")
    (run,) = (launcher.home / "runs").iterdir()
    shown = launcher.command("report", run.name).wait().stdout
    first, second = (int(host.name.removeprefix("node")) for host in slurm.nodes[:2])
    assert f"Hosts    node[{first}-{second}]: 4 workers" in shown
