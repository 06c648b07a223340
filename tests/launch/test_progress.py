"""A script's progress reports reach the user and the journal."""

from __future__ import annotations

import json

from support.launching import Scene

TRAIN = """
import os
from dtrain.runtime import progress
rank = int(os.environ["RANK"])
for step in range(1, 4):
    progress(step, total=3, loss=1 / step + rank, tokens=100)
"""


def test_the_least_rank_is_shown_and_journaled(scene: Scene) -> None:
    launch = scene.run(scene.cluster_file(scene.script(TRAIN)))
    assert launch.code == 0, str(launch)
    assert "dtrain: step 3 of 3 · loss 0.3333" in launch.stderr
    journal = (scene.run_folder() / "journal.jsonl").read_text().splitlines()
    said = [event for event in map(json.loads, journal) if event["event"] == "progress"]
    # Others count until it reports.
    first = next(at for at, event in enumerate(said) if event["process"] == "rank-0")
    assert {event["process"] for event in said[first:]} == {"rank-0"}
    # A process that is slow between two steps reports the second one, too.
    assert [event["said"]["step"] for event in said[first:]] in ([3], [1, 3], [1, 2, 3])
    assert said[-1]["said"]["tokens"] == 300


UNMATCHED = "warning: no line of the output has the {step} of job.progress.line"
PRINTS = """
import os
for step in range(1, 4):
    print(f"step {step}/3 | loss {1 / step + int(os.environ['RANK']):.4f}", flush=True)
"""


def test_what_a_program_prints_is_shown_and_journaled(scene: Scene) -> None:
    line = "step {step}/{total} | loss {loss}"
    script = scene.script(PRINTS)
    launch = scene.run(scene.cluster_file(script, slots=1, progress={"line": line}))
    assert launch.code == 0, str(launch)
    assert "dtrain: step 3 of 3 · loss " in launch.stderr
    journal = (scene.run_folder() / "journal.jsonl").read_text().splitlines()
    said = [event for event in map(json.loads, journal) if event["event"] == "progress"]
    assert {event["process"] for event in said} == {"rank-0"}
    assert said[-1]["said"]["step"] == 3
    assert UNMATCHED not in launch.stderr


def test_a_pattern_that_matches_no_line_causes_a_warning(scene: Scene) -> None:
    cluster = scene.cluster_file(scene.script(PRINTS), slots=1, progress={"line": "iter {step}"})
    launch = scene.run(cluster)
    assert launch.code == 0, str(launch)
    assert UNMATCHED in launch.stderr


HOSTILE = """
import json, os, pathlib, time
folder = pathlib.Path(os.environ["DTRAIN_RUN_DIR"])
os.mkfifo(folder / "x.progress")
os.mkfifo(folder / "rank-1.progress")
good = {"event": "progress", "time": time.time(), "step": 7, "total": 9, "loss": None,
        "tokens": None, "metrics": {}}
deep = [json.dumps({**good, "more": 0}).replace("0}", "[" * n + "]" * n + "}")
        for n in (976, 100_000)]
(folder / "rank-0.progress").write_text("\\n".join([*deep, json.dumps(good), ""]))
print("ready", flush=True)
time.sleep(600)
"""


def test_hostile_progress_reaches_no_other_run(scene: Scene) -> None:
    scene.run(scene.cluster_file(scene.script("pass", "other.py"), name="other"))
    cluster = scene.cluster_file(scene.script(HOSTILE), hosts=1, slots=1)
    launch = scene.launch(cluster)
    launch.until("ready")
    launch.until("node0: rank-0.progress: dropped ")
    launch.until("step 7 of 9")
    listing = scene.command("ps", "--all").wait()
    assert listing.code == 0, listing
    assert {"other", "job"} <= {line.split("-")[0] for line in listing.stdout.splitlines()}
    (run,) = (path.name for path in (scene.home / "runs").iterdir() if path.name.startswith("job"))
    stopped = scene.command("stop", run).wait()
    assert stopped.code == 0, stopped
    assert launch.wait().code == 130
    assert scene.leftovers() == []


def test_json_has_the_reports_of_all(scene: Scene) -> None:
    launch = scene.run(scene.cluster_file(scene.script(TRAIN)), "--json")
    assert launch.code == 0, str(launch)
    events = [json.loads(line) for line in launch.stdout.splitlines()]
    last = {event["process"]: event for event in events if event["event"] == "progress"}
    assert {name: event["step"] for name, event in last.items()} == dict.fromkeys(
        (f"rank-{rank}" for rank in range(4)), 3
    )
    assert all(event["host"] == f"node{int(name[-1]) // 2}" for name, event in last.items()), last
