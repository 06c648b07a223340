"""The example cluster files launch with every strategy that they name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dtrain.launchplan.build import build
from dtrain.spec.load import parse
from dtrain.spec.strategies import STRATEGIES
from dtrain_cli.commands.plan import plan
from dtrain_cli.dry_run import rendered
from support.json_page import undocumented
from support.specs import read

CONFIGS = Path(__file__).parents[2] / "configs"
ROLES = "\n  roles: {chief: 1, worker: 2, ps: 1}"


def under(text: str, framework: str, strategy: str) -> str:
    """The text of an example, changed as its comments describe."""
    if STRATEGIES[framework][strategy].single_host or strategy == "tpu":  # type: ignore[index]
        text = text.replace("node[0-1]", "node0").replace("  slots: 2\n", "")
    text = re.sub(r"\n  roles: .*", "", text)
    roles = ROLES if strategy == "parameter_server" else ""
    return re.sub(r"\n  strategy: .*", f"\n  strategy: {strategy}{roles}", text)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_file_has_a_plan(path: Path) -> None:
    launch = build(read(path))
    assert launch.world_size > 0
    assert undocumented(json.loads(rendered(launch, json=True))) == set()


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES["torch"] if name != "3d"])
def test_one_word_changes_the_strategy_of_train_gpt(strategy: str) -> None:
    text = under((CONFIGS / "train-gpt.yaml").read_text(), "torch", strategy)
    spec = parse(text, "train-gpt.yaml")
    assert spec.warnings == ()
    assert build(spec).world_size == (1 if strategy == "data_parallel" else 4)
    if spec.job.layout is not None:
        assert spec.job.layout.global_batch == 32


@pytest.mark.parametrize("name", ["classify-images.yaml", "classify-text.yaml"])
@pytest.mark.parametrize("strategy", STRATEGIES["tensorflow"])
def test_one_word_changes_the_strategy_of_a_classifier(name: str, strategy: str) -> None:
    text = under((CONFIGS / name).read_text(), "tensorflow", strategy)
    assert build(parse(text, name)).world_size in (1, 2, 4)


def test_the_100b_file_is_what_plan_writes(tmp_path: Path) -> None:
    before = (CONFIGS / "gpt-100b.yaml").read_text()
    file = tmp_path / "gpt-100b.yaml"
    file.write_text(re.sub(r"\n  layout:\n(    .*\n)+", "\n", before))
    assert "tensor:" not in file.read_text()
    plan(file=file, model_size="100B", data=2, output=file)
    assert file.read_text() == before


def test_the_small_file_has_the_shape_of_the_100b_file() -> None:
    large = read(CONFIGS / "gpt-100b.yaml").job.layout
    small = read(CONFIGS / "train-gpt-3d.yaml").job.layout
    assert large is not None
    assert small is not None
    for size in ("tensor", "pipeline", "data"):
        assert getattr(large, size) > 1
        assert getattr(small, size) == 2
    for key in ("sharding", "schedule", "virtual_pipeline", "sequence_parallel", "recompute"):
        assert getattr(small, key) == getattr(large, key)
