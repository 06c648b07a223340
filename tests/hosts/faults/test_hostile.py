"""Workers that resist every end of a run: no process stays, however the run ends."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cluster import job
from support.faults import Field

pytestmark = pytest.mark.netns
Make = Callable[..., Field]


def begun(pid: int) -> float:
    """When a process started. A worker starts before its own processes, but its id may be higher:
    ids begin again at their maximum."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return math.inf  # it has ended


@pytest.mark.parametrize("how", ["stop", "stop --force", "Ctrl-C twice", "a worker that fails"])
def test_ended_by(field: Make, how: str) -> None:
    scene = field(2)
    launch = scene.start(scene.file(script=job("hostile.py"), grace="1s"))
    processes = scene.left()
    assert min(len(found) for found in processes.values()) > 100
    match how:
        case "stop" | "stop --force":
            _, *options = how.split()
            scene.over(scene.command("stop", *options, scene.run.name), 0)
            scene.over(launch, 130)
        case "Ctrl-C twice":
            launch.send(signal.SIGINT)
            launch.until("Ctrl-C again")
            launch.send(signal.SIGINT)
            scene.over(launch, 130)
        case _:
            found = (pid for pid, line in processes["node2"].items() if "hostile.py" in line)
            os.kill(min(found, key=begun), signal.SIGKILL)
            scene.over(launch, 1)
    scene.check(whole=False)


def test_the_supervisor_is_killed(field: Make) -> None:
    """Without it, no process adopts the orphans. The relay ends its leftover processes."""
    scene = field(2)
    launch = scene.start(scene.file(script=job("hostile.py"), grace="1s"))
    found = scene.left()["node2"].items()
    (supervisor,) = [pid for pid, line in found if "dtrain-supervisor" in line]
    os.kill(supervisor, signal.SIGKILL)
    scene.over(launch, 3)
    scene.check(whole=False)
