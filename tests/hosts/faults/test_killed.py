"""kill -9 of each kind of process in a run."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable

import pytest

from support.faults import Field
from support.limits import until

pytestmark = pytest.mark.netns
Make = Callable[..., Field]


def kill(scene: Field, host: str, words: str) -> None:
    """Kill every process of the job on a host that has ``words`` in its command line."""
    victims = find(scene, host, words)
    assert victims, scene.left()
    kill_all(victims)


def find(scene: Field, host: str, words: str) -> list[int]:
    left = scene.left([scene.cluster[host]]).get(host, {})
    return [pid for pid, line in left.items() if words in line]


def kill_all(pids: Iterable[int]) -> None:
    """Skip processes that have already ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_the_relay_repeatedly(field: Make) -> None:
    """It owns nothing: the next relay continues at the last byte."""
    scene = field()
    launch = scene.start(scene.file(pause=0.01))
    hosts, reached = ("node1", "node2"), "all hosts are reachable again"
    for _ in range(5):
        until(lambda: all(find(scene, host, "dtrain-agent") for host in hosts), "both relays")
        # It appears twice if one host is back before the other one is missed.
        before = launch.count(reached)
        for host in hosts:
            kill(scene, host, "dtrain-agent")
        launch.until(reached, count=before + 1)
        scene.advance(20)
    scene.stop()
    scene.over(launch, 0)
    scene.check()


def test_the_launcher_repeatedly(field: Make) -> None:
    scene = field()
    run = scene.detach(scene.file(pause=0.01))
    for _ in range(5):
        scene.kill_launcher()
        attached = scene.command("attach", run)
        until(lambda: scene.in_charge() is not None, "a process to take charge")
        scene.advance(20)
    scene.stop()
    scene.over(attached, 0)
    scene.check()


@pytest.mark.parametrize(
    ("victim", "code", "said"),
    [
        ("numbered.py", 1, "rank 1 on node2 was killed by SIGKILL"),
        ("dtrain-supervisor", 3, "node2: running the job: the supervisor died"),
    ],
    ids=["worker", "supervisor"],
)
def test_a_process_on_a_host(field: Make, victim: str, code: int, said: str) -> None:
    scene = field()
    launch = scene.start(scene.file())
    kill(scene, "node2", victim)
    done = scene.over(launch, code)
    assert said in done.stderr
    scene.check(whole=False)


def test_all_processes_of_a_host_at_once(field: Make) -> None:
    """Including its sshd: the connection breaks, and no process is left when it returns."""
    scene = field()
    launch = scene.start(scene.file())
    node = scene.cluster["node2"]
    node.stop_sshd()
    kill_all(scene.left([node])["node2"])
    node.start_sshd()
    done = scene.over(launch, 3)
    assert "node2: running the job: the supervisor died" in done.stderr
    scene.check(whole=False)


@pytest.mark.torch
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_torchrun(field: Make, backend: str) -> None:
    scene = field(2)
    launch = scene.start(scene.file(rendezvous={"backend": backend}), "--no-check")
    kill(scene, "node2", "torch.distributed.run")
    done = scene.over(launch, 1)
    assert "node2 was killed by SIGKILL" in done.stderr
    scene.check(whole=False, role="rank")
