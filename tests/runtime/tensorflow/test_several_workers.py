"""Two workers give the results of a single process, even after one of them was lost."""

import os
import signal
from pathlib import Path

import pytest

from runtime.tensorflow.conftest import CHECKS, RECIPES, STEPS, losses

pytestmark = pytest.mark.tensorflow

IMAGES = RECIPES / "classify_images.py"
HELD = CHECKS / "held.py"
# Relative: each worker's folder is its own, as on hosts that share no file system.
SAVING = ["--checkpoint", "saved", "--losses", "losses.json"]


def checkpoint_steps(folder: Path) -> list[int]:
    return sorted(int(path.stem.rpartition("-")[2]) for path in folder.glob("ckpt-*.index"))


def test_a_killed_worker_costs_only_the_steps_since_the_checkpoint(
    start, equal, tmp_path: Path
) -> None:
    options = ["--loop", "custom", "--steps", STEPS, "--every", "10", *SAVING]
    options += ["--save-every", "10"]
    step, go = f"step 40/{STEPS}", tmp_path / "go"
    held = [HELD, step, go, IMAGES.stem, *options]
    tasks = start("multi_worker_mirrored", held, worker=2)
    tasks["worker-0"].wait_for(step)
    tasks["worker-1"].signal(signal.SIGKILL)
    assert tasks["worker-1"].wait() == -signal.SIGKILL
    go.touch()
    assert tasks["worker-0"].wait() != 0, "the chief went on alone"
    kept = checkpoint_steps(tmp_path / "worker-0" / "saved")
    assert kept and len(kept) <= 3 and 30 <= kept[-1] < STEPS
    assert not (tmp_path / "worker-1" / "saved").exists(), "only the chief keeps checkpoints"

    # The other worker takes the values from the chief.
    for task in start("multi_worker_mirrored", [IMAGES, *options], worker=2).values():
        task.succeeds()
    resumed = losses(tmp_path / "worker-0" / "losses.json")
    assert min(resumed) == kept[-1] + 1 and max(resumed) == STEPS
    assert equal(resumed)
    assert not (tmp_path / "worker-1" / "losses.json").exists()


def test_fit_ends_on_term_with_a_checkpoint_and_resumes_from_it(
    start, equal, tmp_path: Path
) -> None:
    options = ["--loop", "fit", "--steps", STEPS, "--every", "10", *SAVING]
    options += ["--save-every", "1000"]
    progress = tmp_path / "progress"
    progress.mkdir()
    step, go = f"step 20/{STEPS}", tmp_path / "go"
    held = [HELD, step, go, IMAGES.stem, *options]
    tasks = start("multi_worker_mirrored", held, {"DTRAIN_RUN_DIR": str(progress)}, worker=2)
    tasks["worker-0"].wait_for(step)
    # Only one worker gets it; both must stop after the same step.
    tasks["worker-1"].signal(signal.SIGTERM)
    go.touch()
    for task in tasks.values():
        task.succeeds()
    first = losses(tmp_path / "worker-0" / "losses.json")
    kept = checkpoint_steps(tmp_path / "worker-0" / "saved")
    assert kept == [max(first)] and kept[0] < STEPS
    said = {path.name: path.read_text() for path in progress.iterdir()}
    assert sorted(said) == ["worker-0.progress", "worker-1.progress"]
    assert all('"event": "steps"' in text for text in said.values())
    reports = [name for name, text in said.items() if '"event": "progress"' in text]
    assert reports == ["worker-0.progress"]

    # An elastic job goes on with fewer workers.
    start("multi_worker_mirrored", [IMAGES, *options], worker=1)["worker-0"].succeeds()
    resumed = losses(tmp_path / "worker-0" / "losses.json")
    assert min(resumed) == kept[0] + 1 and max(resumed) == STEPS
    assert equal(first | resumed)


def test_layers_placed_by_hand_in_each_of_two_workers(start, equal, tmp_path: Path) -> None:
    options = ["--loop", "custom", "--steps", "25", "--cpus", "2", "--losses", "losses.json"]
    # A proxy would hang the cluster, if its traffic went there.
    environment = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    for task in start("model_parallel", [IMAGES, *options], environment, worker=2).values():
        assert "2 replica(s)" in task.succeeds()
    assert equal(losses(tmp_path / "worker-0" / "losses.json"))
    assert os.listdir(tmp_path / "worker-1") == []
