"""Relays and supervisors that were stopped with SIGSTOP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from support.launching import Launch, Scene, marked
from support.limits import until

WAIT = """
import os, pathlib, time
here = pathlib.Path(__file__).parent
(here / f"up-{os.environ['RANK']}").touch()
while not (here / "go").exists():
    time.sleep(0.02)
"""
# The command, with pings at short intervals.
QUICK = """
import sys
from dtrain.session.relays import liveness
from dtrain.session.relays import relay
relay.PING_SECONDS, liveness.SUPERVISOR_SILENCE = 0.5, 1.0
sys.argv[0] = "dtrain"
from dtrain_cli.app import main
main()
"""


def launch(scene: Scene, **job: object) -> Launch:
    cluster = scene.cluster_file(scene.script(WAIT), hosts=1, slots=1, **job)
    process = subprocess.Popen(
        [sys.executable, "-c", QUICK, "launch", str(cluster)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "DTRAIN_HOME": str(scene.home), scene.mark: "1"},
    )
    one = scene.adopt(process)
    until((scene.folder / "up-0").exists, "the worker")
    return one


def agent(scene: Scene, name: str) -> int:
    """The only process of this name. A relay that was slow is replaced, and ends."""
    found: list[int] = []

    def only_one() -> bool:
        found[:] = [pid for pid, command in marked(scene.mark) if f" {name} " in command]
        return len(found) == 1

    until(only_one, f"one {name}")
    return found[0]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_stopped_relay_is_replaced(scene: Scene) -> None:
    run = launch(scene)
    relay = agent(scene, "dtrain-agent")
    os.kill(relay, signal.SIGSTOP)
    run.until("node0: the relay does not answer; it may be stopped")
    run.until("all hosts are reachable again")
    until(lambda: gone(relay), "the end of the stopped relay")
    (scene.folder / "go").touch()
    assert run.wait().code == 0
    assert scene.leftovers() == []


def test_a_stopped_supervisor_is_noticed_and_its_job_continues(scene: Scene) -> None:
    run = launch(scene)
    supervisor = agent(scene, "dtrain-supervisor")
    os.kill(supervisor, signal.SIGSTOP)
    run.until(f"the supervisor (process {supervisor}) on node0 does not answer; it may be stopped")
    run.until(f"hint: continue it there: kill -CONT {supervisor}")
    os.kill(supervisor, signal.SIGCONT)
    run.until(f"the supervisor (process {supervisor}) on node0 answers again")
    (scene.folder / "go").touch()
    assert run.wait().code == 0


def test_a_job_with_a_stopped_supervisor_can_be_stopped(scene: Scene) -> None:
    run = launch(scene, grace="1s")
    supervisor = agent(scene, "dtrain-supervisor")
    os.kill(supervisor, signal.SIGSTOP)
    run.until("does not answer")
    run.send(signal.SIGINT)
    done = run.wait()
    assert done.code == 130, done
    assert f"the supervisor (process {supervisor}) was stopped: continued it" in done.stderr
    assert scene.leftovers() == []


def test_a_host_whose_supervisor_stays_stopped_is_lost_after_its_time(scene: Scene) -> None:
    run = launch(scene, restart={"node_timeout": "3s"})
    supervisor = agent(scene, "dtrain-supervisor")
    os.kill(supervisor, signal.SIGSTOP)
    done = run.wait()
    assert done.code == 3, done
    assert f"its supervisor (process {supervisor}) has not answered for" in done.stderr
    until(lambda: not scene.leftovers(), "the end of the job on that host")
