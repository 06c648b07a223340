"""The quick checks that `dtrain launch` runs."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster
from support.cluster import Done, Launcher, job
from support.limits import until

pytestmark = pytest.mark.netns
Hosts = Callable[..., Cluster]
FAKE = str(Path(__file__).parent / "fakes" / "torch-2.13.0")
JOB: dict[str, Any] = {
    "framework": "torch",
    "script": job("echo_env.py"),
    "env": {"PYTHONPATH": FAKE},
}


def not_started(done: Done, cluster: Cluster, launcher: Launcher, *, left: bool = False) -> None:
    """``left``: whether files of an earlier run may exist."""
    assert done.code == 3, str(done)
    assert done.stdout == ""
    assert "error: not started: the check found" in done.stderr
    assert "--no-check" in done.stderr
    assert launcher.left(cluster) == {}
    for host in cluster.hosts:
        assert (host.home / ".dtrain").exists() == left


def of_the_check(done: Done) -> list[str]:
    """The lines of stderr, without the warning that the workers never connected to each other."""
    lines = done.stderr.splitlines()
    (apart,) = [number for number, line in enumerate(lines) if "no worker ever connected" in line]
    assert "the program has to use MASTER_ADDR" in lines.pop(apart + 1)
    del lines[apart]
    return lines


def test_healthy_hosts_are_not_mentioned(hosts: Hosts, launcher: Launcher) -> None:
    """The check uses the launch's connections and leaves no port busy."""
    cluster = hosts(8)
    file = launcher.file(cluster, JOB)
    done = launcher.run(file)
    assert done.code == 0, str(done)
    begun, starting, started, ended = of_the_check(done)
    assert begun.startswith("dtrain: run test-")
    assert starting == "dtrain: starting 8 workers on 8 hosts (node[1-8])"
    assert started == "dtrain: 8 workers started"
    assert ended.startswith("dtrain: done in ")
    for host in cluster.hosts:
        log = (host.folder / "sshd.log").read_text()
        assert log.count("Accepted publickey") == 1
    # Without SO_REUSEADDR, bind also fails on recently closed connections.
    bind = "import socket; socket.socket().bind(('', 29500))"
    assert launcher.command("check", str(file)).wait().code == 0
    cluster["node1"].run(sys.executable, "-c", bind)


def test_a_fault_ends_the_launch(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(4)
    cluster.block("node2", "node4")
    file = launcher.file(cluster, JOB)
    done = launcher.run(file)
    not_started(done, cluster, launcher)
    assert "error    node[2,4] (2): network" in done.stderr
    assert "remedy   " in done.stderr
    assert "error: not started: the check found 1 error\n" in done.stderr
    # The user can launch without the check.
    assert launcher.run(file, "--no-check").code == 0


def test_findings_for_programs(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    (cluster["node1"].home / "job").mkdir()
    file = launcher.file(cluster, {**JOB, "workdir": "~/job"})
    done = launcher.run(file, "--json")
    assert done.code == 3
    events = [json.loads(line) for line in done.stdout.splitlines()]
    (found,) = [event for event in events if event["event"] == "finding"]
    assert found["hosts"] == ["node2"]
    assert (found["severity"], found["subject"]) == ("error", "workdir")
    assert set(found) >= {"seen", "expected"}
    assert "mkdir -p ~/job there" in found["remedy"]
    assert events[-1]["event"] == "finished"
    assert events[-1]["exit_code"] == 3
    (run,) = (launcher.home / "runs").iterdir()
    journal = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    (reported,) = [event["findings"] for event in journal if event["event"] == "findings"]
    assert reported == [{key: found[key] for key in reported[0]}]


def test_a_warning_is_one_line_and_does_not_delay_the_launch(
    hosts: Hosts, launcher: Launcher
) -> None:
    cluster = hosts(3)
    cluster["node2"].run("ip", "link", "set", "dev", "eth0", "mtu", "1400")
    done = launcher.run(launcher.file(cluster, JOB), "--detach")
    assert done.code == 0, str(done)
    lines = done.stderr.splitlines()
    (warning,) = [number for number, line in enumerate(lines) if "warning" in line]
    assert lines[warning : warning + 2] == [
        "dtrain: warning: node2: mtu: eth0 has MTU 1400; MTU 1500 on node[1,3]",
        "dtrain: `dtrain check FILE` shows the remedies",
    ]


def test_an_unreachable_host_is_reported_once_and_hides_nothing(
    hosts: Hosts, launcher: Launcher
) -> None:
    cluster = hosts(4)
    cluster["node2"].run("pkill", "sshd")
    for name in ("node1", "node4"):
        (cluster[name].home / "train.py").write_text("")
    done = launcher.run(launcher.file(cluster, {**JOB, "script": "train.py"}))
    not_started(done, cluster, launcher)
    assert done.stderr.count("node2:") == 1
    assert "error    node3: script" in done.stderr
    assert "~/train.py does not exist" in done.stderr


def test_what_was_found_is_not_left_behind_with_a_lost_host(
    hosts: Hosts, launcher: Launcher
) -> None:
    """An elastic job that is refused before it ran is not retried without the host."""
    cluster = hosts(3)
    cluster["node2"].run("pkill", "sshd")
    elastic = {"restart": {"max": 3}, "elastic": {"min_hosts": 1}}
    done = launcher.run(launcher.file(cluster, {**JOB, "script": "train.py", **elastic}))
    not_started(done, cluster, launcher)
    assert "attempt 2" not in done.stderr


def test_the_process_that_starts_the_job_checks_the_hosts(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    cluster.cut("node2")
    launch = launcher.start(launcher.file(cluster, {**JOB, "script": "train.py"}))
    launch.until("run test-")
    (run,) = (launcher.home / "runs").iterdir()
    journal = run / "journal.jsonl"
    until(
        lambda: journal.exists() and '"checking"' in journal.read_text(),
        "node1 to be there for the look",
    )
    launch.kill()
    cluster.heal()
    shown = launcher.command("attach", run.name)
    shown.until("no host had started it yet; starting it now")
    not_started(shown.wait(), cluster, launcher)


def test_files_that_sync_sends_may_be_missing(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    source = launcher.folder / "source"
    source.mkdir()
    (source / "train.py").write_text("print('trained')")
    job_ = {**JOB, "script": "train.py", "workdir": "~/not/yet", "sync": {"source": "source"}}
    done = launcher.run(launcher.file(cluster, job_))
    assert done.code == 0, str(done)
    assert "warning" not in "".join(of_the_check(done))
    (source / "train.py").unlink()
    not_sent = launcher.run(launcher.file(cluster, job_))
    assert not_sent.code == 2
    assert "has no train.py that would be sent" in not_sent.stderr
    assert "starting" not in not_sent.stderr, "no host is asked"


def test_an_interpreter_and_a_script_that_setup_creates(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    for host in cluster.hosts:
        (host.home / "bin").mkdir()
        (host.home / "bin" / "job-python").symlink_to(sys.executable)
    bring = ['PATH="$HOME/bin:$PATH"', "sleep 1; echo 'print(1)' > ~/new.py"]
    file = launcher.file(cluster, {**JOB, "script": "new.py", "setup": bring}, python="job-python")
    done = launcher.run(file)
    assert done.code == 0, str(done)
    assert "warning" not in "".join(of_the_check(done))
    for host in cluster.hosts:
        (host.home / "new.py").unlink()
    checked = launcher.command("check", str(file)).wait()
    assert checked.code == 0, str(checked)
    assert "no problems found" in checked.stdout


def test_a_module_in_a_package(hosts: Hosts, launcher: Launcher) -> None:
    """The check finds it without an import, which could be slow."""
    cluster = hosts(1)
    package = cluster["node1"].home / "job" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import os\nopen(os.path.expanduser('~/imports'), 'a').write('imported\\n')\n"
    )
    (package / "train.py").write_text("")
    job_ = {"framework": "torch", "env": JOB["env"], "module": "mine.train", "workdir": "~/job"}
    done = launcher.run(launcher.file(cluster, job_))
    assert done.code == 0, str(done)
    assert (cluster["node1"].home / "imports").read_text() == "imported\n"  # by the job
    package.rename(package.with_name("yours"))
    done = launcher.run(launcher.file(cluster, job_))
    not_started(done, cluster, launcher, left=True)
    assert "error    node1: module" in done.stderr


def test_ctrl_c_during_the_check(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    fake = launcher.folder / "fake"
    fake.mkdir()
    (fake / "sitecustomize.py").write_text(
        "import pathlib, time\n(pathlib.Path.home() / 'begun').touch()\ntime.sleep(1000)\n"
    )
    launch = launcher.start(launcher.file(cluster, {**JOB, "env": {"PYTHONPATH": str(fake)}}))
    begun = [host.home / "begun" for host in cluster.hosts]
    until(lambda: all(path.exists() for path in begun), "the job's interpreter on both hosts")
    launch.send(signal.SIGINT)
    done = launch.wait()
    assert done.code == 130, str(done)
    assert "stopping; nothing was started" in done.stderr
    assert "error" not in done.stderr
    assert launcher.left(cluster) == {}


def test_an_unsuitable_spare_is_skipped(hosts: Hosts, launcher: Launcher) -> None:
    """dtrain checks a spare when it takes a rank, and does not repeat findings of other hosts."""
    cluster = hosts(4)
    for name in ("node1", "node2", "node4"):
        (cluster[name].home / "job").mkdir()
    cluster["node1"].run("ip", "link", "set", "dev", "eth0", "mtu", "1400")
    stop = launcher.folder / "stop"
    script = launcher.folder / "train.py"
    script.write_text(
        "import os, pathlib, time\n"
        "print('attempt', os.environ['DTRAIN_ATTEMPT'], flush=True)\n"
        f"while not pathlib.Path({str(stop)!r}).exists(): time.sleep(0.05)\n"
    )
    restart = {"max": 3, "node_timeout": "2s"}
    job_ = {**JOB, "script": str(script), "workdir": "~/job", "restart": restart}
    launcher.notice_silence()
    file = launcher.file(cluster, job_, hosts=["node1", "node2"], spares=["node3", "node4"])
    launch = launcher.start(file)
    launch.until("attempt 1", count=2)
    cluster.power_off("node2")
    launch.until("attempt 3", count=3)  # as dtrain says it, and both ranks
    stop.touch()
    done = launch.wait()
    assert done.code == 0, str(done)
    assert "error    node3: workdir" in done.stderr
    assert "node4 replaces node3" in done.stderr
    assert done.stderr.count("MTU 1400") == 3  # once for each host with a new finding
    assert launcher.left(cluster) == {}
