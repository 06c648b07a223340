"""How a launch on this machine ends: success, failure or stop. No process is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.failures.cause import Failure
from dtrain.session.watching.failure_output import explained
from support.launching import JOBS, Scene, marked
from support.limits import HANG, until
from support.ports import free_pair

TALK = "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
WAIT = """
import os, time
print("up", os.environ["RANK"], flush=True)
time.sleep(3600)
"""


def test_a_worker_that_fails_before_the_first_host_has_finished_starts_the_job_again(
    scene: Scene,
) -> None:
    program = """\
import os, sys, time
if os.environ["RANK"] == "0":
    time.sleep(500 if os.environ["DTRAIN_ATTEMPT"] == "1" else 0)
elif os.environ["DTRAIN_ATTEMPT"] == "1":
    raise ValueError("bad batch")
else:
    time.sleep(500)
"""
    file = scene.cluster_file(
        scene.script(program), slots=1, success_policy="first_host", restart={"max": 1}
    )
    done = scene.run(file)
    assert done.code == 0, str(done)
    assert "rank 1 on node1 exited with status 1" in done.stderr
    assert "1 worker on node0, the first host, finished" in done.stderr
    assert scene.leftovers() == []


def test_done(scene: Scene) -> None:
    launch = scene.run(scene.cluster_file(scene.script(TALK)))
    assert launch.code == 0, str(launch)
    assert sorted(launch.stdout.splitlines()) == [
        f"[node{rank // 2} {rank}] rank {rank} of 4" for rank in range(4)
    ]
    assert "all 4 workers finished" in launch.stderr
    assert (scene.run_folder() / "logs" / "node1" / "worker-3.out").read_text() == "rank 3 of 4\n"
    assert scene.leftovers() == []


def test_files_are_private(scene: Scene) -> None:
    assert scene.run(scene.cluster_file(scene.script(TALK))).code == 0
    for top in (scene.home / "runs", scene.nodes):
        for path in top.rglob("*"):
            assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.torch
def test_a_failed_worker_ends_the_job_and_is_named_first(scene: Scene) -> None:
    file = scene.cluster_file(JOBS / "fail.py", slots=1, args=["1", "raise"])
    launch = scene.run(file, "--no-check")
    assert launch.code == 1
    report = launch.stderr[launch.stderr.index("error: ") :]
    assert report.startswith("error: rank 1 on node1 exited with status 1\n")
    assert "ValueError: bad batch on rank 1" in report
    echo = report.find("Connection closed by peer")
    assert echo == -1 or report.index("bad batch") < echo
    shown = scene.command("ps", scene.run_folder().name).wait().stdout
    assert re.search(r"node\[0-1] +ended ", shown), shown
    assert scene.leftovers() == []


RAISES = """
import os, sys, threading, time
from pathlib import Path
raised = Path(sys.argv[1])
def hook(*error):
    sys.__excepthook__(*error)
    raised.touch()

if os.environ["RANK"] == "2":
    threading.Thread(target=time.sleep, args=[3600]).start()  # Python waits for it at the exit
    sys.excepthook = hook
    raise ValueError("bad batch")
while not raised.exists():
    time.sleep(0.01)
if os.environ["RANK"] == "0":
    raise RuntimeError("Connection closed by peer")
time.sleep(3600)
"""


def test_an_exception_counts_although_its_worker_does_not_exit(scene: Scene) -> None:
    """A peer that notices it exits first. The worker itself is killed by the stop."""
    raised = scene.folder / "raised"
    launch = scene.run(scene.cluster_file(scene.script(RAISES), args=[str(raised)]))
    assert launch.code == 1
    report = launch.stderr[launch.stderr.index("error: ") :]
    assert report.startswith("error: rank 2 on node1 failed\n")
    assert "ValueError: bad batch" in report


def test_an_exception_from_long_before_is_no_cause(tmp_path: Path) -> None:
    (tmp_path / "node0").mkdir()
    stderr = tmp_path / "node0" / "worker-0.err"
    stderr.write_text('Traceback (most recent call last):\n  File "a", line 1\nValueError: old\n')
    os.utime(stderr, (1000, 1000))
    worker = Failure("node0", "worker", 0, 0, 2000)
    assert explained(worker, tmp_path, since=999).message == "ValueError: old"
    assert explained(worker, tmp_path, since=1001).message == ""
    with stderr.open("a") as file:  # it goes on: the exception was caught
        file.write("".join(f"INFO step {step}\n" for step in range(20)))
    assert explained(worker, tmp_path, since=999).message == ""
    stderr.write_text("Killed\n")
    assert explained(worker, tmp_path, since=999).message == ""


def test_the_last_line_before_a_kill_is_no_message(tmp_path: Path) -> None:
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "worker-0.err").write_text("UserWarning: slow\n")
    killed = explained(Failure("node0", "worker", 0, 0, 2000, signal="SIGKILL"), tmp_path)
    assert (killed.message, killed.traceback) == ("", "UserWarning: slow")


ABORTS = (
    """\
{others}F1127 17:00:12.589540    1404 client.h:80] Terminating process because the JAX distributed \
service detected fatal errors. absl::Status: INTERNAL: Shutdown barrier has failed.
Barrier result: 'DEADLINE_EXCEEDED: Barrier timed out. Id: Shutdown::172::0.
# of tasks that reached the barrier: 1/2.
The first task at the barrier: 1. Some timed out task names:
0
RPC: /xla.coordination.CoordinationService/ShutdownTask
*** Check failure stack trace: ***
"""
    + "    @     0x7f99be640634  absl::log_internal::LogMessage::SendToLog()\n" * 20
)


@pytest.mark.parametrize("others", [0, 13], ids=["a rank", "the coordinator"])
def test_the_report_of_an_abort_does_not_hide_the_exception_before_it(
    others: int, tmp_path: Path
) -> None:
    """JAX aborts all processes when one, after an exception, waits for the others in vain. Which of
    them ends first is chance."""
    (tmp_path / "node0").mkdir()
    raised = 'Traceback (most recent call last):\n  File "a", line 1\nValueError: bad batch\n'
    service = "E1127 17:00:12.589719    1442 coordination_service.cc:1520] Barrier timed out.\n"
    (tmp_path / "node0" / "worker-0.err").write_text(
        raised + ABORTS.format(others=service * others)
    )
    found = explained(Failure("node0", "worker", 0, 0, 2000), tmp_path, since=999)
    assert found.message == "ValueError: bad batch"
    assert not found.is_echo


@pytest.mark.parametrize("report", [ABORTS.format(others=""), "terminate called without x\n", ""])
def test_an_abort_at_the_exit_does_not_hide_the_exception(report: str, tmp_path: Path) -> None:
    """The process is the first that ends. absl switches on the stacks that Python writes then."""
    (tmp_path / "node0").mkdir()
    raised = 'Traceback (most recent call last):\n  File "a", line 1\nValueError: bad batch\n'
    stack = (
        "Fatal Python error: Aborted\n\n"
        "Current thread 0x00007f14271bbb80 (most recent call first):\n"
        '  File "/lib/python3.11/site-packages/jax/_src/distributed.py", line 199 in shutdown\n'
    )
    stderr = tmp_path / "node0" / "worker-0.err"
    worker = Failure("node0", "worker", 0, 0, 2000, signal="SIGABRT")
    stderr.write_text(raised + report + stack)
    assert explained(worker, tmp_path).message == "ValueError: bad batch"
    stderr.write_text(raised + "INFO step\n" * 20 + report + stack)
    assert "ValueError" not in explained(worker, tmp_path).message


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
        ("os._exit(7)", "exited with status 7"),
        ("raise SystemExit('out of luck')", "exited with status 1"),
    ],
)
def test_every_kind_of_end_is_reported(scene: Scene, end: str, words: str) -> None:
    text = f"import os, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep(3600)\n"
    launch = scene.run(scene.cluster_file(scene.script(text)))
    assert launch.code == 1
    assert f"error: rank 1 on node0 {words}" in launch.stderr
    assert scene.leftovers() == []


def test_a_failure_is_explained(scene: Scene) -> None:
    """A sentence and a remedy for the first cause."""
    text = (
        "import os, time\nif os.environ['RANK'] == '1': import no_such_module\ntime.sleep(3600)\n"
    )
    launch = scene.run(scene.cluster_file(scene.script(text), hosts=1), "--json")
    assert launch.code == 1
    finished = json.loads(launch.stdout.splitlines()[-1])
    first = finished["failures"][0]
    assert first["explanation"]["id"] == "module-missing"
    assert first["explanation"]["what"] == "the Python of that host has no module no_such_module"
    assert not first["explanation"]["host"]
    assert finished["hint"].startswith(first["explanation"]["what"])
    assert "`cluster.python`" in finished["hint"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stop_signals(scene: Scene, number: signal.Signals) -> None:
    launch = scene.launch(scene.cluster_file(scene.script(WAIT)))
    launch.until("up", count=4)
    launch.send(number)
    done = launch.wait()
    assert done.code == 130
    why = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}.get(
        number, "its terminal was closed"
    )
    assert f"dtrain: {why}: stopping" in done.stderr
    assert scene.leftovers() == []


def test_a_second_stop_kills_workers_that_ignore_term(scene: Scene) -> None:
    launch = scene.launch(scene.cluster_file(JOBS / "zombies.py", grace=3000))
    launch.until("lingering", count=4)
    launch.send(signal.SIGINT)
    launch.until("Ctrl-C again")
    launch.send(signal.SIGINT)
    assert launch.wait().code == 130
    assert scene.leftovers() == []
    # `dtrain attach` shows what the journal has, and there Ctrl-C only leaves.
    journal = (scene.run_folder() / "journal.jsonl").read_text()
    assert "(`dtrain stop --force` kills now)" in journal
    assert "Ctrl-C again" not in journal


def test_a_failure_leaves_no_zombies(scene: Scene) -> None:
    launch = scene.run(scene.cluster_file(JOBS / "zombies.py", args=["fail"]))
    assert launch.code == 1
    assert "failed on purpose" in launch.stderr
    assert scene.leftovers() == []


def test_a_finished_worker_leaves_no_zombies(scene: Scene) -> None:
    assert scene.run(scene.cluster_file(JOBS / "zombies.py", args=["exit"])).code == 0
    assert scene.leftovers() == []


def test_a_broken_pipe_ends_the_job(scene: Scene) -> None:
    chatter = "import time\nwhile True:\n    print('line', flush=True)\n    time.sleep(0.01)\n"
    reader = subprocess.Popen(
        ["head", "-n", "3"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    launch = scene.launch(scene.cluster_file(scene.script(chatter)), stdout=reader.stdin)
    assert reader.stdin is not None and reader.stdout is not None
    reader.stdin.close()
    assert len(reader.stdout.readlines()) == 3
    reader.wait()
    assert launch.wait().code == 141
    assert "Traceback" not in launch.stderr
    assert "BrokenPipe" not in launch.stderr
    assert scene.leftovers() == []


def test_a_closed_terminal_ends_the_job(scene: Scene) -> None:
    """The terminal closes, with HUP, while the launch writes to it."""
    ours, theirs = os.openpty()
    launch = scene.launch(
        scene.cluster_file(scene.script(WAIT)),
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(1, __import__("termios").TIOCSCTTY, 0),
    )
    os.close(theirs)
    seen = b""
    while seen.count(b"up ") < 4:
        seen += os.read(ours, 1 << 16)
    os.close(ours)
    launch.wait()
    until(lambda: not scene.leftovers(), "all processes to end")


def test_a_killed_launcher_leaves_a_job_that_its_lease_ends(scene: Scene) -> None:
    file = scene.cluster_file(scene.script(WAIT), on_disconnect="stop", lease="15s", grace="1s")
    launch = scene.launch(file)
    launch.until("up", count=4)
    launch.send(signal.SIGKILL)
    launch.wait()
    until(lambda: not scene.leftovers(), "the lease to end the job")


def port_of(scene: Scene) -> int:
    """The port that the scene's only run has drawn."""
    (record,) = scene.home.glob("runs/*/run.json")
    port: int = json.loads(record.read_text())["port"]
    return port


def test_two_runs_at_once_do_not_touch_each_other(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Scene(tmp_path / "other")
    try:
        first, second = free_pair()
        ports = {"ports": f"{first}-{second}"}
        one = scene.launch(scene.cluster_file(scene.script(WAIT), rendezvous=ports))
        two = other.launch(other.cluster_file(scene.script(WAIT), rendezvous=ports))
        one.until("up", count=4)
        two.until("up", count=4)
        assert {port_of(scene), port_of(other)} == {first, second}
        one.send(signal.SIGINT)
        assert one.wait().code == 130
        assert scene.leftovers() == []
        assert len([line for line in other.leftovers() if "script.py" in line]) == 4
        two.send(signal.SIGINT)
        assert two.wait().code == 130
        assert other.leftovers() == []
    finally:
        other.close()


def test_a_run_inside_a_run_is_another_run(scene: Scene, tmp_path: Path) -> None:
    """A worker may launch a run. Each of the two runs ends separately."""
    (tmp_path / "inner").mkdir()
    inner = Scene(tmp_path / "inner")
    cluster = inner.cluster_file(scene.script(TALK, "inner.py"), hosts=1)
    outer = scene.script(
        "import subprocess, sys\n"
        f"command = [sys.executable, '-m', 'dtrain_cli', 'launch', {str(cluster)!r}]\n"
        "sys.exit(subprocess.run(command).returncode)\n"
    )
    launch = scene.run(
        scene.cluster_file(outer, hosts=1, slots=1, env={"DTRAIN_HOME": str(inner.home)})
    )
    assert launch.code == 0, str(launch)
    assert len(re.findall(r"^\[node0 0\] \[node0 \d\] rank \d of 2$", launch.stdout, re.M)) == 2
    assert scene.leftovers() == []


def test_no_job_outlives_a_launcher_that_never_started_it(scene: Scene) -> None:
    """Interrupted while its setup line still runs."""
    flag = scene.folder / "setting-up"
    cluster = scene.cluster_file(
        scene.script(TALK), hosts=1, setup=[f"touch {flag}; exec sleep 3600"]
    )
    launch = scene.launch(cluster)
    until(flag.exists, "setup to begin")
    launch.send(signal.SIGINT)
    assert launch.wait().code == 130
    assert "Ctrl-C: stopping; nothing was started" in launch.stderr
    assert scene.leftovers() == []
    assert list(scene.nodes.rglob("*")) == []


def test_the_interpreter_is_the_one_that_runs_dtrain(scene: Scene) -> None:
    text = "import sys\nprint(sys.executable)\n"
    launch = scene.run(scene.cluster_file(scene.script(text), hosts=1, slots=1))
    assert launch.stdout == f"[node0 0] {sys.executable}\n"


def test_a_pipe_that_closes_with_ctrl_c_is_no_second_stop(scene: Scene) -> None:
    """As with `dtrain launch … | tee`: both get Ctrl-C, and workers keep their grace."""
    save = scene.script(
        "import signal, time\n"
        "def save(*_):\n"
        "    for _ in range(40): print('saving', flush=True); time.sleep(0.02)\n"
        "    open('saved', 'w').close(); raise SystemExit\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(1)\n"
    )
    reading, writing = os.pipe()
    launch = scene.launch(scene.cluster_file(save, hosts=1, slots=1), stdout=writing)
    os.close(writing)
    assert os.read(reading, 1 << 16)
    launch.send(signal.SIGINT)
    os.close(reading)
    assert launch.wait().code == 130
    assert (scene.folder / "saved").exists()


def test_stopped_while_a_port_is_busy(scene: Scene) -> None:
    """The move to the next port keeps a stop request."""
    ports = free_pair()
    with contextlib.ExitStack() as taken:
        for port in ports:
            taken.enter_context(socket.create_server(("127.0.0.1", port)))
        flag = scene.folder / "setting-up"
        cluster = scene.cluster_file(
            scene.script(TALK),
            setup=[f'[ "$DTRAIN_HOST" = node0 ] || {{ touch {flag}; sleep 1; }}'],
            rendezvous={"ports": "{}-{}".format(*ports)},
        )
        launch = scene.launch(cluster, "--no-check")
        until(flag.exists, "node1's setup, while node0 finds its port taken")
        launch.send(signal.SIGINT)
        done = launch.wait()
    assert done.code in (3, 130)
    assert done.stdout == ""
    assert "workers started" not in done.stderr


def test_a_full_disk_on_this_machine_stops_the_job(scene: Scene) -> None:
    """In a separate namespace, with the run's folder on a disk of 64 KiB."""
    shout = scene.script("while True: print('x' * 999, flush=True)\n")
    cluster = scene.cluster_file(shout, hosts=1, slots=1)
    scene.home.mkdir()
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k t "$DTRAIN_HOME" && exec "$@"',
         "sh", sys.executable, "-m", "dtrain_cli", "launch", str(cluster)],
        env={**os.environ, "DTRAIN_HOME": str(scene.home)},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "error: this machine cannot store the run's files" in done.stderr
    assert "No space left" in done.stderr
    assert "DTRAIN_HOME" in done.stderr
    assert scene.leftovers() == []


def test_output_that_could_not_be_stored_is_fetched_later(scene: Scene) -> None:
    """Also if the journal, which is small, could be written meanwhile. The job does not start
    again."""
    go = scene.folder / "go"
    program = scene.script(
        "import os, time\n"
        "print('up', flush=True)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.1)\n"
        "for number in range(20000): print('line', number, flush=True)\n"
        "time.sleep(500)\n"
    )
    launch = scene.launch(scene.cluster_file(program, hosts=1, slots=1, restart={"max": 3}))
    launch.until("up")
    resource.prlimit(launch.process.pid, resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    go.touch()
    done = launch.wait()
    assert done.code == 3
    assert "cannot store the run's files: File too large" in done.stderr
    run = scene.run_folder().name
    assert f"`dtrain attach {run}` fetches the rest of the output" in done.stderr
    assert scene.leftovers() == []
    assert "files; this launcher ends" in scene.command("report", run).wait().stdout
    done = scene.command("attach", run).wait()
    assert done.code == 1, str(done)
    assert "stopped the job: this machine cannot store the run's files" in done.stderr
    (written,) = scene.nodes.rglob("worker-0.out")
    stored = scene.run_folder() / "logs" / "node0" / "worker-0.out"
    assert stored.stat().st_size > 1 << 16
    assert stored.read_bytes() == written.read_bytes()


def test_a_job_ended_from_outside_is_not_done(scene: Scene) -> None:
    """Its workers exit with status 0 without having finished."""
    quit_ = scene.script(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: exit(0))\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(1)\n"
    )
    launch = scene.launch(scene.cluster_file(quit_, hosts=1))
    launch.until("up", count=2)
    for pid, command in marked("DTRAIN_RUN_ID"):
        with contextlib.suppress(OSError):  # another test's
            if "dtrain-supervisor" in command and str(scene.nodes) in environment(pid):
                os.kill(pid, signal.SIGTERM)
    done = launch.wait()
    assert done.code == 1
    assert "error: node0 stopped the workers\nproblem: node0: running the job: " in done.stderr
    assert "the supervisor got SIGTERM" in done.stderr
    assert scene.leftovers() == []


def environment(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_text(errors="replace")
