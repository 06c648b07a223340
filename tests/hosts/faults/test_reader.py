"""Training does not wait for a stopped launcher or for unread output."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.faults import Field

pytestmark = pytest.mark.netns
Make = Callable[..., Field]

LONG = 1 << 20
"""Bytes of every fiftieth line."""


def most_memory(pid: int) -> int:
    """The most memory, in bytes, that a process has used so far."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) << 10


def test_an_unread_pipe(field: Make) -> None:
    """A terminal stopped with Ctrl-S behaves the same."""
    scene = field(2)
    reading, writing = os.pipe()
    launch = scene.start(scene.file(pause=0.001, size=LONG), stdout=writing)
    os.close(writing)
    before = most_memory(launch.process.pid)
    scene.advance(1000)  # 80 MB in total, far more than the pipe holds
    assert most_memory(launch.process.pid) < before + (32 << 20)
    scene.stop()
    shown = launch.drain(reading)
    scene.over(launch, 0)
    scene.check()
    for rank in (0, 1):
        numbers = re.findall(rb"out %d (\d{9})" % rank, shown)
        assert [int(number) for number in numbers] == [*range(1, scene.step(rank) + 1)]


@pytest.mark.parametrize("way", ["launch", "attach"])
def test_a_stopped_launcher(field: Make, way: str) -> None:
    scene = field(2)
    if way == "launch":
        watching = scene.start(scene.file(pause=0.001, size=LONG))
    else:
        run = scene.detach(scene.file(pause=0.001, size=LONG))
        scene.kill_launcher()
        watching = scene.command("attach", run)
        watching.until("out 1 ", count=5)
    watching.send(signal.SIGSTOP)
    scene.advance(600)  # 24 MB from each host: more than pipes and TCP windows hold
    watching.send(signal.SIGCONT)
    scene.advance()
    scene.stop()
    scene.over(watching, 0)
    scene.check()
