"""What the watchers in the pods of a job see, and what disturbs them."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from dtrain.runs import events
from dtrain.runs.journal import JournalReader
from support.kubernetes.desk import Desk
from support.limits import until

pytestmark = [pytest.mark.kubernetes, pytest.mark.netns]

STEPS = """\
import os, time
from pathlib import Path
from dtrain.runtime import progress

folder, rank = Path(os.environ["DTRAIN_RUN_DIR"]), int(os.environ["RANK"])

def watcher():
    file = folder / "watcher.pid"
    while not (text := file.read_text() if file.exists() else "").endswith("\\n"):
        time.sleep(0.01)
    return int(text)

def another(known):
    while watcher() == known:
        time.sleep(0.01)
    return watcher()

for step in range(1, 4):
    progress(step, total=9, loss=1 / step)
first = watcher()
print("step 3 is done", flush=True)
second = another(first)
for step in range(4, 7):
    progress(step, total=9, loss=1 / step)
print("step 6 is done", flush=True)
another(second)
for step in range(7, 10):
    progress(step, total=9, loss=1 / step)
"""


def write(desk: Desk, program: str, **job: object) -> Path:
    """A job of Python processes."""
    file = desk.shared_file("", command=["python3", "/shared/program.py"], **job)
    (desk.folder / "shared" / "program.py").write_text(program)
    return file


def test_progress_goes_on_with_another_watcher(desk: Desk) -> None:
    """The launcher and the watchers are killed. The last steps come just before a pod ends."""
    launch = desk.start("launch", str(write(desk, STEPS)))
    launch.until("step 3 is done", count=4)
    where = desk.start("stacks", "test").wait()
    assert "ranks 0-3 on " in where.stdout, str(where)
    kill = "kill -KILL $(cat /dtrain/run/watcher.pid)"
    assert desk.start("exec", "test", "--", kill).wait().code == 0
    launch.until("step 6 is done", count=4)
    launch.kill()
    (run,) = desk.runs
    done = desk.start("attach", run.name).wait()
    assert done.code == 0, str(done)
    assert "step 9 of 9" in done.stderr
    assert "no telemetry" not in done.stderr
    journal = [event for _, event in JournalReader(run / "journal.jsonl").read()]
    steps = [event.report.step for event in journal if isinstance(event, events.Progressed)]
    assert steps == sorted(steps)
    assert steps[-1] == 9


def test_a_job_that_hangs_starts_again(desk: Desk) -> None:
    program = """\
        import os, threading
        def all_reduce():
            threading.Event().wait()
        print("attempt", os.environ["DTRAIN_ATTEMPT"], flush=True)
        if os.environ["DTRAIN_ATTEMPT"] == "1":
            all_reduce()
    """
    watchdog = {"silence": "5s", "then": "restart"}
    file = write(desk, textwrap.dedent(program), restart={"max": 1}, watchdog=watchdog)
    done = desk.start("launch", str(file)).wait()
    assert done.code == 0, str(done)
    assert "no output and no progress from any worker for 5 s; all pods start again" in done.stderr
    assert done.stdout.count("attempt 2") == 4
    assert desk.is_empty()


def test_a_job_without_watchers_goes_on(desk: Desk) -> None:
    """No hang is looked for: the logs alone cannot show it."""
    desk.kubernetes.deny("get", "pods/exec")
    wait = "until [ -e /shared/enough ]; do sleep 0.05; done"
    launch = desk.start("launch", str(desk.shared_file(wait, watchdog={"silence": "1s"})))
    launch.until("no search for hangs: ")
    desk.enough()
    done = launch.wait()
    assert done.code == 0, str(done)
    assert done.stderr.count("pods/exec") == 1


def test_a_network_that_is_cut_is_no_hang(desk: Desk) -> None:
    """Pods whose reports do not arrive may be working."""
    file = desk.shared_file(
        "n=0; until [ -e /shared/enough ]; do n=$((n + 1)); echo $n; echo $n >/shared/n; sleep 0.1;"
        " done",
        watchdog={"silence": "2s"},
    )
    launch = desk.start("launch", str(file))
    number = desk.folder / "shared" / "n"

    def written() -> int:
        return int((number.exists() and number.read_text()) or 0)

    until(written, "the first line")
    with desk.kubernetes.down():
        launch.until("trying again")
        last = written() + 50
        until(lambda: written() > last, "five seconds")
    launch.until(f"{last + 5}\n")
    desk.enough()
    done = launch.wait()
    assert done.code == 0, str(done)
    assert "collecting stacks" not in done.stderr
