"""`dtrain exec` in the pods of a run."""

from __future__ import annotations

import re
import signal

import pytest

from support.kubernetes.desk import WAIT, Desk
from support.launching import Launch

pytestmark = [pytest.mark.kubernetes, pytest.mark.netns]


def waiting(desk: Desk, python: str = "python3") -> Launch:
    """A job whose workers all run."""
    secret = {"TOKEN": "hush"}
    file = desk.file(WAIT, secrets=[*secret])
    file.write_text(file.read_text().replace("cluster:\n", f"cluster:\n  python: {python}\n"))
    launch = desk.start("launch", str(file), **secret)
    launch.until("the worker waits", count=4)
    return launch


def test_a_command_runs_in_each_pod(desk: Desk) -> None:
    waiting(desk)
    line = "hostname; env; echo oops >&2; test $JOB_COMPLETION_INDEX = 0 || exit 3"
    done = desk.start("exec", "test", "--", line).wait()
    assert done.code == 1, str(done)
    assert re.search(r"\[node0\] test-\w+-node-0-0\n", done.stdout)
    assert re.search(r"\[node1\] test-\w+-node-0-1\n", done.stdout)
    assert "JOB_COMPLETION_INDEX=1" in done.stdout
    assert "hush" not in done.stdout
    assert done.stderr.count("oops") == len(re.findall(r"\] oops\n", done.stderr))
    assert "error: node1: exited with status 3\n" in done.stderr
    large = "head -c 3000000 /dev/zero | tr '\\0' x"
    one = desk.start("exec", "test", "--host", "node1", "--", large).wait()
    assert one.code == 0, str(one)
    assert "3,000,000 bytes" in one.stdout


def test_what_ends_the_commands(desk: Desk) -> None:
    """Ctrl-C and the death of the launcher; with all of their processes."""
    waiting(desk)
    script = "echo ready; setsid sleep 601 & sleep 602"
    for end in (signal.SIGINT, signal.SIGKILL):
        command = desk.start("exec", "test", "--no-fold", "--", script)
        command.until("ready", count=2)
        command.send(end)
        assert end == signal.SIGKILL or command.wait().code == 130
        gone = "for n in $(seq 600); do pgrep -a -f 'sleep [6]0' || exit 0; sleep 0.1; done; exit 7"
        done = desk.start("exec", "test", "--", gone).wait()
        assert done.code == 0, str(done)


def test_a_pod_that_is_gone_and_one_that_dies(desk: Desk) -> None:
    waiting(desk)
    command = desk.start("exec", "test", "--no-fold", "--", "echo ready; sleep 601")
    command.until("ready", count=2)
    desk.kubernetes.run_out_of_memory(desk.pod(1))
    done = command.wait()
    assert done.code == 3, str(done)
    assert re.search(r"node(1|\[0-1\]): running a command: .* was killed by SIGKILL", done.stderr)


def test_why_no_command_runs(desk: Desk) -> None:
    launch = waiting(desk, python="/nowhere/python3")
    done = desk.start("exec", str(desk.folder / "cluster.yaml"), "--", "true").wait()
    assert done.code == 2
    assert "name a run instead" in done.stderr
    done = desk.start("exec", "test", "--", "true").wait()
    assert done.code == 3
    assert "error: node[0-1]: running a command: there is no /nowhere/python3" in done.stderr
    desk.kubernetes.deny("get", "pods/exec")
    done = desk.start("exec", "test", "--", "true").wait()
    assert done.code == 3
    assert 'cannot get resource "pods/exec"' in done.stderr
    launch.send(signal.SIGINT)
    launch.wait()
    done = desk.start("exec", "test", "--", "true").wait()
    assert done.code == 2
    assert "no pod of run test-" in done.stderr
