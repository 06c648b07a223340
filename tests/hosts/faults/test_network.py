"""The network between the launching machine and its hosts drops or resets packets."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

from support.faults import Field

pytestmark = pytest.mark.netns
Make = Callable[..., Field]

LONG = "DTRAIN_LONG_FAULTS" in os.environ
"""Whether a detected cut lasts 30 seconds instead of the minimum."""
ONE, SEVERAL, ALL = ["node2"], ["node1", "node3"], ["node1", "node2", "node3"]
SAID = "cannot be reached; its workers keep running"


@pytest.mark.parametrize("names", [ONE, ALL], ids=["one", "all"])
def test_dropped_for_a_moment(field: Make, names: list[str]) -> None:
    """The cut has no effect: TCP resends the dropped packets."""
    scene = field(alive=120)  # so that the cut stays short on a busy machine
    launch = scene.start(scene.file())
    for name in names:
        scene.cluster.cut(name)
    scene.advance(20)  # for a second
    scene.cluster.heal()
    scene.advance()
    scene.stop()
    done = scene.over(launch, 0)
    assert "cannot be reached" not in done.stderr
    scene.check()


@pytest.mark.parametrize("names", [SEVERAL, ALL], ids=["several", "all"])
@pytest.mark.parametrize("how", ["drop", "reset"])
def test_cut_for_longer(field: Make, how: str, names: list[str]) -> None:
    """`test_sshd_is_restarted` loses one host."""
    scene = field(alive=20 if LONG else 10)
    launch = scene.start(scene.file())
    cut = scene.cluster.cut if how == "drop" else scene.cluster.reset
    for name in names:
        cut(name)
    launch.until(SAID, count=len(names))
    scene.advance(600 if LONG else 10)
    scene.cluster.heal()
    launch.until("all hosts are reachable again")
    scene.advance()
    scene.stop()
    scene.over(launch, 0)
    scene.check()


def test_repeated_resets(field: Make) -> None:
    scene = field()
    launch = scene.start(scene.file(pause=0.002))
    for _ in range(10):
        for name in ALL:
            scene.cluster.reset(name)
        scene.advance(20)
        scene.cluster.heal()
        scene.advance(100)
    scene.stop()
    scene.over(launch, 0)
    scene.check()


UNKNOWN = "no host could be reached for 3 s (job.restart.node_timeout); this machine may have lost"


def cut_all(field: Make, how: str = "drop", **job: object) -> Field:
    """A job that its launcher has left, because it reaches no host."""
    scene = field()
    file = scene.file(restart={"node_timeout": "3s"}, **job)
    notify = "notify: {on: [failed], command: [sh, -c, cat > told]}\n"
    file.write_text(file.read_text() + notify)
    launch = scene.start(file)
    cut = scene.cluster.cut if how == "drop" else scene.cluster.reset
    for name in ALL:
        cut(name)
    done = scene.over(launch, 3)
    assert UNKNOWN in done.stderr
    assert f"`dtrain attach {scene.run.name}` follows it again" in done.stderr
    assert "failed" not in done.stderr
    told = json.loads((file.parent / "told").read_text())
    assert (told["event"], told["exit_code"]) == ("unattended", 3)
    scene.advance()  # it continues
    return scene


@pytest.mark.parametrize("how", ["drop", "reset"])
def test_all_cut_and_attached_later(field: Make, how: str) -> None:
    scene = cut_all(field, how)
    assert "unattended" in scene.command("ps").wait().stdout
    early = scene.over(scene.command("attach", scene.run.name), 3)
    assert UNKNOWN in early.stderr
    scene.cluster.heal()
    attached = scene.command("attach", scene.run.name)
    attached.until("run test")
    scene.advance()
    scene.stop()
    scene.over(attached, 0)
    scene.check()


def test_a_job_ends_while_all_are_cut(field: Make) -> None:
    scene = cut_all(field)
    scene.stop()
    scene.until_nothing_is_left()
    scene.cluster.heal()
    scene.over(scene.command("attach", scene.run.name), 0)
    scene.check()


def test_all_cut_and_stopped(field: Make) -> None:
    """The leftovers end when the hosts are reachable."""
    scene = cut_all(field)
    scene.over(scene.command("stop", scene.run.name), 3)
    scene.cluster.heal()
    scene.stop_leftovers()
    scene.over(scene.command("stop", scene.run.name), 2)  # over already
    scene.check_hosts()


def test_sshd_is_restarted(field: Make) -> None:
    scene = field()
    launch = scene.start(scene.file())
    for times in (1, 2):
        scene.cluster["node2"].stop_sshd()
        launch.until("node2 cannot be reached", count=times)
        scene.advance()
        scene.cluster["node2"].start_sshd()
        launch.until("all hosts are reachable again", count=times)
        scene.advance()
    scene.stop()
    scene.over(launch, 0)
    scene.check()
