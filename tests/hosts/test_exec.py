"""`dtrain exec` over real sshds."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import Cluster
from dtrain import hostlist
from support.cluster import Launcher
from support.json_page import undocumented
from support.launching import Done
from support.limits import GONE

pytestmark = pytest.mark.netns
Hosts = Callable[..., Cluster]
JOB = {"framework": "none", "command": ["sleep", "600"], "secrets": ["TOKEN"]}
SLEEP = "sh -c 'setsid sleep 601 & sleep 602 & wait'"


def execute(launcher: Launcher, file: Path, *argv: str) -> Done:
    return launcher.command("exec", str(file), *argv).wait()


def unfolded(shown: str) -> list[tuple[str, str]]:
    """Each host and each line. Hosts that were slow to answer have a line of their own."""
    found = [re.fullmatch(r"\[(\S+)\] +(.*)", line) for line in shown.splitlines()]
    return sorted((host, line[2]) for line in found if line for host in hostlist.unfold(line[1]))


def test_output_that_is_alike_and_that_differs(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(3)
    file = launcher.file(cluster, JOB)
    done = execute(launcher, file, "--", "pwd; hostname; echo oops >&2")
    assert done.code == 0, str(done)
    where = {f"node{n}": str(cluster[f"node{n}"].home) for n in (1, 2, 3)}
    assert unfolded(done.stdout) == sorted(
        (host, text) for host in where for text in (host, where[host])
    )
    assert unfolded(done.stderr) == [(host, "oops") for host in where]
    one = execute(launcher, file, "--host", "node2", "--", "printf", "%s|", "a b", "$HOME", "")
    assert one.stdout == "[node2] a b|$HOME||\n", str(one)


def test_a_host_that_fails_and_one_that_is_off(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(3)
    launcher.notice_silence()
    cluster.power_off("node3")
    file = launcher.file(cluster, JOB)
    line = "echo here; test $(hostname) = node1 || exit 7"
    done = execute(launcher, file, "--json", "--", line)
    assert done.code == 3, str(done)
    events = [json.loads(text) for text in done.stdout.splitlines()]
    assert undocumented(events) == set()
    ended = {event["host"]: event for event in events if event["event"] == "ended"}
    assert (ended["node1"]["code"], ended["node1"]["error"]) == (0, "")
    assert (ended["node2"]["code"], ended["node2"]["error"]) == (7, "exited with status 7")
    assert ended["node3"]["code"] is None
    assert ended["node3"]["error"]
    assert ended["node3"]["hint"]
    lines = [event["host"] for event in events if event["event"] == "line"]
    assert sorted(lines) == ["node1", "node2"]
    assert events[-1] == {
        "schema": 1,
        "event": "finished",
        "exit_code": 3,
        "failed": ["node2", "node3"],
    }


def test_what_ends_the_commands(hosts: Hosts, launcher: Launcher) -> None:
    """Ctrl-C, the time limit, and the death of the launcher; with all of their processes."""
    cluster = hosts(2)
    file = launcher.file(cluster, JOB)
    script = f"echo ready; {SLEEP}"
    interrupted = launcher.command("exec", str(file), "--no-fold", "--", script)
    interrupted.until("ready", count=2)
    interrupted.send(signal.SIGINT)
    assert interrupted.wait().code == 130
    assert launcher.left(cluster, within=GONE) == {}
    late = execute(launcher, file, "--timeout", "1s", "--", script)
    assert late.code == 1, str(late)
    assert "error: node[1-2]: stopped at the time limit" in late.stderr
    assert launcher.left(cluster, within=GONE) == {}
    killed = launcher.command("exec", str(file), "--no-fold", "--", script)
    killed.until("ready", count=2)
    killed.kill()
    assert launcher.left(cluster, within=GONE) == {}


def peak_memory(process: subprocess.Popen[bytes]) -> int:
    """Kilobytes, until it has ended. The kernel's own count includes the tests' before the exec."""
    peak = 0
    while True:
        try:
            process.wait(0.05)
            return peak
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):  # it has ended since
                status = Path(f"/proc/{process.pid}/status").read_text()
                if found := re.search(r"VmHWM:\s*(\d+) kB", status):
                    peak = int(found[1])


def test_huge_and_binary_output(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    file = launcher.file(cluster, JOB)
    long_line = "head -c 30000000 /dev/zero | tr '\\0' x; echo"
    lines = "yes $(printf %01000d 7) | head -n 20000"
    binary = "printf 'a\\377\\033]0;title\\007b\\n'"
    launch = launcher.command("exec", str(file), "--", f"{long_line}; {lines}; {binary}")
    assert 30_000 < peak_memory(launch.process) < 250_000
    assert launch.process.returncode == 0, launch.stderr
    for reader in launch._readers:
        reader.join()
    assert "30,000,000 bytes" in launch.stdout
    assert launch.count("0000000007") >= 20_000
    assert "] a\\xffb\n" in launch.stdout


def test_a_live_run_is_not_disturbed(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    file = launcher.file(cluster, {**JOB, "command": ["sh", "-c", "echo up; exec sleep 600"]})
    launch = launcher.start(file, env={"TOKEN": "hush"})
    launch.until("] up", count=2)
    (run,) = (launcher.home / "runs").iterdir()
    # The brackets keep the shell of this command from being found.
    done = execute(launcher, Path(run.name), "--", "env; pgrep -f -c 'sleep [6]00'")
    assert done.code == 0, str(done)
    assert [text for _, text in unfolded(done.stdout)].count("1") == 2
    assert "hush" not in done.stdout
    assert "DTRAIN_RUN_ID" not in done.stdout
    launch.send(signal.SIGINT)
    stopped = launch.wait()
    assert stopped.code == 130, str(stopped)
    assert launcher.left(cluster) == {}
