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
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "hsdp": {"strategy": "hsdp"},
    "tensor": {"strategy": "tensor"},
    "pipeline": {"strategy": "pipeline"},
    "zb-1p": {
        "strategy": "pipeline",
        "layout": {"pipeline": 4, "micro_batch": 2, "schedule": "zb-1p"},
    },
    "3d": {"strategy": "3d", "layout": SPLIT, "checkpoint": "dense"},
    "context, resumed from 3d": {"strategy": "3d", "layout": CONTEXT, "checkpoint": "dense"},
    "context": {"strategy": "3d", "layout": CONTEXT, "checkpoint": "context"},
    "3d, resumed from context": {"strategy": "3d", "layout": SPLIT, "checkpoint": "context"},
    "compiled": {
        "strategy": "3d",
        "layout": {"data": 4, "compile": True},
        "checkpoint": "compiled",
    },
    "offloaded, resumed from compiled": {
        "strategy": "3d",
        "layout": {"data": 4, "sharding": "full", "offload_activations": True},
        "checkpoint": "compiled",
    },
    "reduced in bf16": {"strategy": "3d", "layout": {"data": 4, "reduce": "bf16"}},
}
EXPERTS = ["--experts", "4"]
MIXTURE: dict[str, dict[str, Any]] = {
    "experts": {
        "strategy": "3d",
        "layout": {"data": 4, "expert": 4, "sharding": "full"},
        "checkpoint": "mixture",
    },
    "experts, resumed in context and a pipeline": {
        "strategy": "3d",
        "layout": {"pipeline": 2, "context": 2, "expert": 2, "micro_batch": 4},
        "checkpoint": "mixture",
    },
}


@pytest.mark.torch
def test_torch(
    hosts: Hosts, launcher: Launcher, text: Path, gpt_alone: list[float], tmp_path: Path
) -> None:
    """All strategies in one launch, because a launch costs more than its steps.
    `tests/launchplan/test_strategies.py` shows how a strategy gets from a file to its ranks, and
    `tests/runtime/torch/test_layouts.py` trains one process too."""
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
    done = launcher.run(launcher.file(cluster, document, slots=2), timeout=HANG)
    assert done.code == 0, str(done)
    assert f"step {STEPS} of {STEPS}" in done.stderr
    assert launcher.left(cluster) == {}
    for name in [*TORCH, *mixture]:
        wanted = experts_alone if name in mixture else gpt_alone
        start = SAVED_AT if "resumed" in name else 0
        assert losses(tmp_path / f"{name}.json") == pytest.approx(wanted[start:], rel=1e-4), name


IMAGES = ["--loop", "custom", "--steps", "30", "--every", "10"]


@pytest.fixture(scope="module")
def images_alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    found = alone("classify_images.py", tmp_path_factory.mktemp("alone"), IMAGES)
    assert len(found) == 30 and found[-1] < found[0] - 0.1
    return found


def tensorflow_job(
    hosts: Hosts, launcher: Launcher, strategy: str, count: int, *options: str, **job: Any
) -> tuple[list[float], str]:
    cluster = hosts(count)
    file = launcher.folder / "losses.json"
    document = {
        "framework": "tensorflow",
        "strategy": strategy,
        "script": str(RECIPES / "classify_images.py"),
        "args": [*(options or IMAGES), "--losses", str(file)],
        **job,
    }
    done = launcher.run(launcher.file(cluster, document), timeout=HANG)
    assert done.code == 0, str(done)
    assert launcher.left(cluster) == {}
    return losses(file), done.stdout


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("strategy", "count", "options"),
    [
        # The strategies of one host: tests/runtime/tensorflow/test_one_host.py.
        ("multi_worker_mirrored", 2, []),
        ("model_parallel", 2, ["--cpus", "2"]),
    ],
)
def test_tensorflow(
    hosts: Hosts,
    launcher: Launcher,
    images_alone: list[float],
    strategy: str,
    count: int,
    options: list[str],
) -> None:
    found, _ = tensorflow_job(hosts, launcher, strategy, count, *IMAGES, *options)
    assert found == pytest.approx(images_alone, rel=1e-3)


@pytest.mark.tensorflow
def test_parameter_servers_reach_the_same_level(hosts: Hosts, launcher: Launcher) -> None:
    roles = {"chief": 1, "worker": 2, "ps": 1, "evaluator": 1}
    options = ["--loop", "custom", "--steps", "320", "--every", "20"]
    options += ["--checkpoint", str(launcher.folder / "saved"), "--save-every", "40"]
    _, stdout = tensorflow_job(hosts, launcher, "parameter_server", 2, *options, roles=roles)
    (accuracy,) = [line for line in stdout.splitlines() if "chief0" in line and "held-out" in line]
    assert float(accuracy.split()[-1].rstrip("%")) > 0.85, accuracy
