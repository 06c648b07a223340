"""Every strategy, launched over SSH across hosts, trains as one process alone does.

Same data, same seed, same global batch, float32: then every step's loss is the same number, and
gradients, shards, schedules and collectives are correct.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster
from support.cluster import Launcher, job
from support.limits import HANG
from support.recipes import GPT, RECIPES, alone, corpus, losses

pytestmark = pytest.mark.netns
Hosts = Callable[..., Cluster]

STEPS = 5
BATCH = 16


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def gpt_alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    options = [*GPT, "--data", str(text), "--steps", str(STEPS), "--batch", str(BATCH)]
    found = alone("train_gpt.py", tmp_path_factory.mktemp("alone"), options)
    assert len(found) == STEPS and found[-1] < found[0] - 0.3
    return found


SPLIT = {"tensor": 2, "pipeline": 2, "micro_batch": 4, "sequence_parallel": True}
FILE = {"data": 4, "sharding": "optimizer", "micro_batch": 2}
CONTEXT = {"context": 2, "data": 2, "sharding": "full"}
SAVED_AT = 3
"""The step after which later cases resume."""
TORCH: dict[str, dict[str, Any]] = {
    "cluster file": {},
    "hsdp": {"strategy": "hsdp"},
    "zb-1p": {
        "strategy": "pipeline",
        "layout": {"pipeline": 4, "micro_batch": 2, "schedule": "zb-1p"},
    },
    "3d": {"strategy": "3d", "layout": SPLIT, "checkpoint": "dense"},
    "context, resumed from 3d": {"strategy": "3d", "layout": CONTEXT, "checkpoint": "dense"},
}
EXPERTS = ["--experts", "4"]
MIXTURE: dict[str, dict[str, Any]] = {
    "experts": {"strategy": "3d", "layout": {"data": 4, "expert": 4, "sharding": "full"}},
}


@pytest.mark.torch
def test_torch(
    hosts: Hosts, launcher: Launcher, text: Path, gpt_alone: list[float], tmp_path: Path
) -> None:
    """What communicates between hosts, in one launch, because a launch costs more than its steps.
    `tests/launchplan/test_strategies.py` shows how a strategy gets from a file to its ranks, and
    `tests/runtime/torch/test_layouts.py` trains all layouts on one host."""
    options = ["--data", str(text), *GPT, "--steps", str(STEPS), "--batch", str(BATCH)]
    experts_alone = alone("train_gpt.py", tmp_path, [*options, *EXPERTS])
    mixture = {
        name: {**case, "options": {"experts": int(EXPERTS[1])}} for name, case in MIXTURE.items()
    }
    cluster, cases = hosts(2), tmp_path / "cases.json"
    cases.write_text(json.dumps(TORCH | mixture))
    document = {
        "framework": "torch",
        "strategy": "auto",
        "layout": FILE,
        "training": {"global_batch": BATCH},
        "script": job("strategies.py"),
        "args": [str(cases), str(tmp_path), "--save-every", str(SAVED_AT), *options],
    }
    done = launcher.run(launcher.file(cluster, document, slots=2), "--no-check", timeout=HANG)
    assert done.code == 0, str(done)
    assert f"step {STEPS} of {STEPS}" in done.stderr
    assert launcher.left(cluster) == {}
    for name in [*TORCH, *mixture]:
        wanted = experts_alone if name in mixture else gpt_alone
        start = SAVED_AT if "resumed" in name else 0
        assert losses(tmp_path / f"{name}.json") == pytest.approx(wanted[start:], rel=1e-4), name


@pytest.mark.tensorflow
def test_tensorflow_model_parallel(hosts: Hosts, launcher: Launcher, tmp_path: Path) -> None:
    """The other strategies train in `tests/runtime/tensorflow`, and find each other across hosts
    in `test_training.py` and `tests/programs`."""
    options = ["--loop", "custom", "--steps", "30", "--every", "10"]
    images_alone = alone("classify_images.py", tmp_path, options)
    assert len(images_alone) == 30 and images_alone[-1] < images_alone[0] - 0.1
    cluster, file = hosts(2), launcher.folder / "losses.json"
    document = {
        "framework": "tensorflow",
        "strategy": "model_parallel",
        "script": str(RECIPES / "classify_images.py"),
        "args": [*options, "--cpus", "2", "--losses", str(file)],
    }
    done = launcher.run(launcher.file(cluster, document), "--no-check", timeout=HANG)
    assert done.code == 0, str(done)
    assert launcher.left(cluster) == {}
    assert losses(file) == pytest.approx(images_alone, rel=1e-3)
