"""Several commands act on one run at the same time."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from threading import Event

import pytest

from support.cluster import job
from support.faults import Field
from support.limits import until

pytestmark = pytest.mark.netns
Make = Callable[..., Field]


def test_two_attach_at_once(field: Make) -> None:
    """One takes charge and the other watches. It takes charge when the first is killed."""
    scene = field(2)
    run = scene.detach(scene.file())
    scene.kill_launcher()
    launches = [scene.command("attach", run) for _ in range(2)]
    both = {launch.process.pid: launch for launch in launches}
    for launch in launches:
        launch.until("out 1 ", count=5)
    first = scene.in_charge()
    assert first in both
    del both[first]
    os.kill(first, signal.SIGKILL)
    (second,) = both
    until(lambda: scene.in_charge() == second, "the other to take charge")
    scene.advance()
    scene.stop()
    scene.over(both[second], 0)
    scene.check()


@pytest.mark.parametrize("after", [0.2, 0.5])
def test_stop_while_attaching(field: Make, after: float) -> None:
    """At any point of its start, SIGTERM only makes it leave."""
    scene = field(2)
    run = scene.detach(scene.file())
    scene.kill_launcher()
    attached = scene.command("attach", run)
    Event().wait(after)
    stopped = scene.command("stop", run)
    scene.over(stopped, 0)
    assert attached.wait().code in (2, 130)  # it started after the end of the run, or left
    scene.check(whole=False)


def test_stop_where_two_have_attached(field: Make) -> None:
    """When the process in charge leaves, the other takes charge and gets the stop request."""
    scene = field(2)
    run = scene.detach(scene.file())
    scene.kill_launcher()
    both = [scene.command("attach", run) for _ in range(2)]
    for attached in both:
        attached.until("out 1 ", count=5)
    scene.over(scene.command("stop", run), 0)
    for attached in both:
        scene.over(attached, 130)
    scene.check(whole=False)


@pytest.mark.parametrize("attended", [True, False], ids=["attended", "unattended"])
def test_stop_twice_at_once(field: Make, attended: bool) -> None:
    """Two stop requests do not mean a kill: workers keep their grace period."""
    scene = field(2)
    run = scene.detach(scene.file(script=job("graceful.py"), grace="5m"))
    if not attended:
        scene.kill_launcher()
    both = [scene.command("stop", run) for _ in range(2)]
    for stopping in both:
        stopping.until("2 workers on 2 hosts")
    (scene.folder / "asked").touch()
    for stopping in both:
        scene.over(stopping, 0)
    scene.check()


def test_stop_force_after_stop(field: Make) -> None:
    scene = field(2)
    run = scene.detach(scene.file(script=job("hostile.py"), grace="10m"))
    gentle = scene.command("stop", run)
    gentle.until("stopping with TERM, KILL")
    scene.over(scene.command("stop", "--force", run), 0)
    scene.over(gentle, 0)
    scene.check(whole=False)


def test_stop_of_a_stopped_launch(field: Make) -> None:
    """Ctrl-Z in its terminal, and `dtrain stop` in another."""
    scene = field(2)
    launch = scene.start(scene.file())
    launch.send(signal.SIGSTOP)
    scene.over(scene.command("stop", scene.run.name), 0)
    assert re.search(r"stopped after .*: dtrain stop;", scene.over(launch, 130).stderr)
    scene.check(whole=False)


def test_stop_of_leftovers(field: Make) -> None:
    """On a host that was lost and has returned. Two commands may request it at once."""
    scene = field(2)
    launch = scene.start(scene.file(restart={"node_timeout": "10s"}))
    scene.cluster.cut("node2")
    scene.over(launch, 3)
    assert scene.left()
    stopping = scene.command("stop", scene.run.name)
    stopping.until("node2 cannot be reached yet; retrying")
    stopping.send(signal.SIGINT)
    scene.over(stopping, 130)
    scene.cluster.heal()
    both = [scene.command("stop", scene.run.name) for _ in range(2)]
    codes = sorted(stopping.wait().code for stopping in both)
    assert codes in ([0, 0], [0, 2])  # the second may find that the run is over
    scene.check_hosts()


def test_a_host_without_an_answer_does_not_count_as_clean(field: Make) -> None:
    scene = field(2)
    launch = scene.start(scene.file(restart={"node_timeout": "4s"}))
    scene.cluster.cut("node2")
    scene.over(launch, 3)
    (folder,) = scene.cluster["node2"].home.glob(".dtrain/nodes/test-*/node2")
    folder.chmod(0o777)  # refused: others could have changed it
    scene.cluster.heal()
    scene.over(scene.command("stop", scene.run.name), 3)
    assert scene.left()
    folder.chmod(0o700)
    scene.stop_leftovers()
    scene.check_hosts()


def test_stop_with_a_host_out_of_reach(field: Make) -> None:
    """It reports the host, can be interrupted or repeated, and finishes when the host returns."""
    scene = field(2)
    run = scene.detach(scene.file())
    scene.cluster.cut("node2")
    stopping = scene.command("stop", run)
    stopping.until("node2 cannot be reached")
    stopping.send(signal.SIGINT)
    scene.over(stopping, 130)
    again = scene.command("stop", run)
    again.until("node2 cannot be reached")
    node1, node2 = scene.cluster.hosts
    scene.until_nothing_is_left(node1)
    assert scene.left([node2])
    scene.cluster.heal()
    scene.over(again, 0)
    scene.check(whole=False)


def test_stop_of_a_launch_with_unread_output(field: Make) -> None:
    scene = field(2)
    reading, writing = os.pipe()
    launch = scene.start(scene.file(pause=0.001, size=1 << 20), stdout=writing)
    os.close(writing)
    scene.advance(200)
    scene.over(scene.command("stop", scene.run.name), 0)
    scene.until_nothing_is_left()
    launch.drain(reading)
    scene.over(launch, 130)
    scene.check(whole=False)
