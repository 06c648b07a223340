"""A job that falls silent: everybody is told who waits where."""

from __future__ import annotations

import pytest

from support.launching import Scene

HANG = """
import os, threading
from pathlib import Path

def all_reduce():
    threading.Event().wait()

def load_batch():
    threading.Event().wait()

print("up", flush=True)
if os.environ["RANK"] == "2" and os.environ["DTRAIN_ATTEMPT"] == "1":
    load_batch()
if os.environ["DTRAIN_ATTEMPT"] == "1":
    all_reduce()
"""


def test_the_rank_that_the_others_wait_for_is_named(scene: Scene) -> None:
    file = scene.cluster_file(scene.script(HANG), watchdog={"silence": "1s"}, restart={"max": 3})
    done = scene.run(file)
    assert done.code == 1, str(done)
    assert "error: no output and no progress from any worker for 1 s" in done.stderr
    script = scene.folder / "script.py"
    waiting = f"called by all_reduce ({script}:6)"
    assert f"ranks 0, 1, 3 on node[0-1]: in Event.wait, {waiting}" in done.stderr
    assert f"rank 2 on node1: in Event.wait, called by load_batch ({script}:9)" in done.stderr
    assert scene.leftovers() == []


def test_a_hang_may_be_a_reason_to_start_again(scene: Scene) -> None:
    file = scene.cluster_file(
        scene.script(HANG), watchdog={"silence": "1s", "then": "restart"}, restart={"max": 1}
    )
    done = scene.run(file)
    assert done.code == 0, str(done)
    assert "called by load_batch" in done.stderr
    assert "attempt 2 starts" in done.stderr
    assert scene.leftovers() == []


REPORT = """
import threading, time
for number in range(4):
    print("beat", number, flush=True)
    time.sleep(1.2 * (number == 2))
"""


@pytest.mark.parametrize("then", ["report", "stop"])
def test_silence_is_counted_from_the_last_word(scene: Scene, then: str) -> None:
    file = scene.cluster_file(scene.script(REPORT), watchdog={"silence": "1h", "then": then})
    done = scene.run(file)
    assert done.code == 0, str(done)
    assert "no output" not in done.stderr


def test_a_report_ends_nothing(scene: Scene) -> None:
    file = scene.cluster_file(
        scene.script("import time\ntime.sleep(8)\nprint('done', flush=True)\n"),
        watchdog={"silence": "1s", "then": "report"},
    )
    done = scene.run(file)
    assert done.code == 0, str(done)
    assert "asking each where it is" in done.stderr
    assert done.stdout.count("done") == 4
