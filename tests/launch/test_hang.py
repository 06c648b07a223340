"""A job that falls silent: everybody is told who waits where."""

from __future__ import annotations

import shutil
import sys
import venv
from pathlib import Path

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


@pytest.mark.parametrize("told_by", ["py-spy", "python itself"])
def test_the_rank_that_the_others_wait_for_is_named(scene: Scene, told_by: str) -> None:
    environment = scene.folder / "environment"
    venv.create(environment, symlinks=True)
    if told_by == "py-spy":
        spy = shutil.which("py-spy", path=str(Path(sys.executable).parent))
        assert spy is not None
        (environment / "bin/py-spy").symlink_to(spy)
    file = scene.cluster_file(
        scene.script(HANG),
        watchdog={"silence": "1s"},
        restart={"max": 3},
        python=str(environment / "bin/python"),
        env={"PATH": "/usr/bin:/bin", "VIRTUAL_ENV": ""},
    )
    # The bare environment has no torch, which this script can do without.
    done = scene.run(file, "--no-check")
    assert done.code == 1, str(done)
    assert "error: no output and no progress from any worker for 1 s" in done.stderr
    script = scene.folder / "script.py"
    waiting = f"called by all_reduce ({script}:6)"
    assert f"ranks 0, 1, 3 on node[0-1]: in wait, {waiting}" in done.stderr
    assert f"rank 2 on node1: in wait, called by load_batch ({script}:9)" in done.stderr
    assert ("Fatal Python error: Aborted" in done.stdout + done.stderr) == (told_by != "py-spy")
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


# Longer in all than the silence that is allowed, and never as long between two words.
TALK = """
import time
for number in range(30):
    print("beat", number, flush=True)
    time.sleep(0.2)
"""


def test_silence_is_counted_from_the_last_word(scene: Scene) -> None:
    file = scene.cluster_file(scene.script(TALK), watchdog={"silence": "4s"})
    done = scene.run(file)
    assert done.code == 0, str(done)
    assert "no output" not in done.stderr


def test_a_report_ends_nothing(scene: Scene) -> None:
    go = scene.folder / "go"
    script = scene.script(
        "import pathlib, sys, time\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\n"
        "print('done', flush=True)\n"
    )
    file = scene.cluster_file(script, args=[str(go)], watchdog={"silence": "1s", "then": "report"})
    launch = scene.launch(file)
    launch.until("asking each where it is", count=2)  # it has reported once, and waits again
    go.touch()
    done = launch.wait()
    assert done.code == 0, str(done)
    assert done.stdout.count("done") == 4
