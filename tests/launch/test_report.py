"""`dtrain report` of a real run with known losses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.launching import Scene
from support.repository import committed

TRAIN = """
import json, os, time
from dtrain.runtime import phase, progress

class Truth(dict):
    def begin(self):
        self.now = time.monotonic()

    def spend(self, name):
        self[name] = self.get(name, 0.0) + time.monotonic() - self.now
        self.begin()

    def write(self, attempt):
        open(f"{folder}/truth-{attempt}-{rank}", "w").write(json.dumps(self))

truth, rank, folder, first = Truth(), os.environ["RANK"], os.environ["SCENE"], 0
saved = f"{folder}/saved-{rank}"
time.sleep(1)
if os.path.exists(saved):
    truth.begin()
    with phase("load"):
        time.sleep(1.2)
    truth.spend("load")
    first = int(open(saved).read())
for step in range(first + 1, 61):
    kept = "steps" if first or step <= 20 else "lost"
    truth.begin()
    with phase("data"):
        time.sleep(0.02)
    if step > first + 1:
        truth.spend("data" if kept == "steps" else "lost")
    time.sleep(0.1)
    progress(step, total=60, loss=5 / step, tokens=1000)
    if step > first + 1:
        truth.spend(kept)
    truth.begin()
    if step == 20:
        with phase("save"):
            time.sleep(1.2)
        truth.spend("save")
        open(saved, "w").write("20")
    if step == 40 and first == 0:
        truth.write(1)
        raise ValueError("injected <b>loss</b>")
truth.write(2)
"""


def test_the_report_has_the_losses_of_the_run(scene: Scene) -> None:
    cluster = scene.cluster_file(
        scene.script(TRAIN),
        hosts=1,
        slots=1,
        env={"SCENE": str(scene.folder)},
        restart={"max": 1},
        expected={"step_time": 0.05, "gflop_per_token": 1.0, "peak_tflops": 1.0},
    )
    launch = scene.run(cluster)
    assert launch.code == 0, str(launch)
    assert "planned 0.05 s" in launch.stderr
    truth: dict[str, float] = {}
    for attempt in (1, 2):
        for name, spent in json.loads((scene.folder / f"truth-{attempt}-0").read_text()).items():
            truth[name] = truth.get(name, 0.0) + spent
    events = [*map(json.loads, (scene.run_folder() / "journal.jsonl").read_text().splitlines())]
    failed = next(at for at, event in enumerate(events) if event["event"] == "failed")
    reports = [event["said"]["step"] for event in events[:failed] if event["event"] == "progress"]
    assert reports[-1] > 20  # a process reports at most once or twice a second
    run = scene.run_folder().name
    shown = scene.command("report", run, "--json").wait()
    assert shown.code == 0, shown
    (found,) = json.loads(shown.stdout)["runs"]
    seconds, wall = found["goodput"]["seconds"], found["goodput"]["wall_s"]
    assert sum(seconds.values()) == pytest.approx(wall)
    # No more than the times that the script has spent: the rest depends on the machine's load.
    # `tests/runs/test_goodput.py` compares exact times.
    for name in ("data", "save", "load", "steps", "lost"):
        assert seconds[name] > 0.7 * truth[name], name
    assert seconds["start"] > 2
    assert [one["last_step"] for one in found["attempts"]] == [40, 60]
    text = scene.command("report", run).wait()
    assert text.code == 0, text
    assert "lost work" in text.stdout
    both = scene.command("report", run, run).wait()
    assert both.code == 0, both
    assert "1.00" in both.stdout


@pytest.mark.parametrize("sent", [False, True], ids=["on the hosts", "sent"])
def test_the_report_names_the_code(scene: Scene, sent: bool) -> None:
    code = scene.folder / "code"
    code.mkdir()
    scene.script("print('step')", "code/train.py")
    commit = committed(code)
    job: dict[str, Any] = {"workdir": str(code)}
    if sent:
        job = {"workdir": str(scene.folder / "copy"), "sync": {"source": str(code)}}
    cluster = scene.cluster_file("train.py", framework="none", **job)
    runs: list[str] = []
    for text in ("print('step')", "print('other step')"):
        scene.script(text, "code/train.py")
        assert scene.run(cluster).code == 0
        runs += {folder.name for folder in (scene.home / "runs").iterdir()} - {*runs}
    first, second = runs
    shown = scene.command("report", first, second, "--json").wait()
    before, after = (run["code"] for run in json.loads(shown.stdout)["runs"])
    assert (before["commit"], before["changed"]) == (commit, [])
    assert (after["commit"], after["changed"]) == (commit, ["train.py"])
    compared = scene.command("report", first, second).wait().stdout
    short = commit[:12]
    assert f"- code: commit {short}\n+ code: commit {short}, changed: train.py\n" in compared
