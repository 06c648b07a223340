"""Every layout gives the losses, gradient norms and weights of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.torch.ranks import HERE, run

pytestmark = pytest.mark.torch

SPLIT = {"tensor": 2, "pipeline": 2}

ONE = {
    "alone": {},
    "data_parallel": {"strategy": "data_parallel"},
    "offload": {"layout": {"offload": True, "micro_batch": 8}},
    "padded": {"kind": "padded"},
    "resumed from four ranks": {"resume": True},
    "resumed from experts": {"kind": "mixture", "resume": True},
}
TWO = {
    "ddp, at once": {"layout": {"data": 2, "micro_batch": 4}},
    "optimizer": {"layout": {"data": 2, "sharding": "optimizer"}},
    "gradients": {"layout": {"data": 2, "sharding": "gradients"}},
    "offload": {
        "layout": {"data": 2, "sharding": "full", "offload": True, "offload_activations": True}
    },
    "compiled, reduced in bf16": {
        "layout": {"data": 2, "reduce": "bf16", "compile": True},
        "precision": "fp32",
        "kind": "tied",
        "stop": 1,
    },
    "resumed from compiled": {
        "layout": {"data": 2, "sharding": "full", "offload_activations": True},
        "precision": "fp32",
        "kind": "tied",
        "resume": True,
    },
    "full recompute": {"layout": {"data": 2, "sharding": "full", "recompute": "full"}},
    "selective recompute": {"layout": {"data": 2, "recompute": "selective"}},
    "context": {"layout": {"context": 2, "recompute": "selective"}},
    "tensor, recomputed": {
        "layout": {"tensor": 2, "sequence_parallel": True, "recompute": "selective"}
    },
    "1f1b, recomputed": {"layout": {"pipeline": 2, "recompute": "full"}},
    "looped gpipe": {"layout": {"pipeline": 2, "schedule": "gpipe", "virtual_pipeline": 2}},
    "zb-1p": {"layout": {"pipeline": 2, "schedule": "zb-1p", "virtual_pipeline": 2}},
    "tied, fsdp": {"strategy": "fsdp", "kind": "tied"},
    "tied, tensor": {"strategy": "tensor", "kind": "tied"},
    "normed, tensor": {"strategy": "tensor", "kind": "normed"},
    "normed, tensor alone": {"layout": {"tensor": 2}, "kind": "normed"},
    "positioned, tensor": {"strategy": "tensor", "kind": "positioned", "logits": 64},
    "tensor, own loss": {"strategy": "tensor", "loss": "own", "logits": 64},
    "padded, context": {"layout": {"context": 2}, "kind": "padded"},
    "padded, pipeline": {"strategy": "pipeline", "kind": "padded"},
    "padded, tensor": {"strategy": "tensor", "kind": "padded", "logits": 32},
    "padded, fsdp": {"strategy": "fsdp", "kind": "padded"},
    "bf16, tensor": {"strategy": "tensor", "precision": "bf16"},
    "bf16, ddp": {"strategy": "ddp", "precision": "bf16"},
    "fp16, ddp": {"strategy": "ddp", "precision": "fp16"},
    "fp16, fsdp": {"strategy": "fsdp", "precision": "fp16"},
    "experts, resumed in context": {
        "layout": {"context": 2, "expert": 2, "sharding": "optimizer"},
        "kind": "mixture",
        "resume": True,
    },
    "resumed in tensor": {"strategy": "tensor", "resume": True, "logits": 32},
    "resumed in zb-v": {"layout": {"pipeline": 2, "schedule": "zb-v"}, "resume": True},
}
FOUR = {
    "tensor, copied": {"layout": {"tensor": 2, "data": 2, "sequence_parallel": True}},
    "tensor, in context": {"layout": {"tensor": 2, "context": 2, "sequence_parallel": True}},
    "experts in a pipeline": {
        "layout": {"pipeline": 2, "data": 2, "expert": 2, "schedule": "gpipe"},
        "kind": "mixture",
    },
    "experts, sharded": {
        "layout": {
            "data": 4,
            "expert": 2,
            "sharding": "full",
            "recompute": "full",
            "micro_batch": 1,
        },
        "kind": "mixture",
        "stop": 1,
    },
    "interleaved, zero-1": {
        "layout": {"pipeline": 2, "virtual_pipeline": 2, "data": 2, "sharding": "optimizer"}
    },
    "context, hybrid": {
        "layout": {"context": 2, "data": 2, "sharding": "hybrid", "shard": 2, "recompute": "full"}
    },
    "fp16, all split": {
        "layout": {**SPLIT, "sequence_parallel": True},
        "precision": "fp16",
        "logits": 32,
    },
    "tensor, sharded": {
        "layout": {"tensor": 2, "data": 2, "sharding": "full", "sequence_parallel": True},
        "stop": 1,
    },
    "resumed in a pipeline of four": {"strategy": "pipeline", "resume": True},
    "resumed in fsdp": {"strategy": "fsdp", "resume": True},
}
EIGHT = {
    "resumed in 3d": {
        "layout": {**SPLIT, "data": 2, "sharding": "optimizer", "recompute": "full"},
        "resume": True,
    },
}

Report = dict[str, dict[str, Any]]


def train(folder: Path, cases: dict[str, Any], world: int, checkpoints: Path) -> Report:
    (folder / "cases.json").write_text(json.dumps(cases))
    run(world, HERE / "layouts_job.py", folder / "cases.json", folder / "report.json", checkpoints)
    report: Report = json.loads((folder / "report.json").read_text())
    assert report.keys() == cases.keys()
    return report


def assert_equal(report: Report, cases: dict[str, Any]) -> None:
    for name, case in cases.items():
        found = report[name]
        assert found["start"] == (1 if "resume" in case else 0), name
        assert found["logits"] == case.get("logits", found["logits"]), name
        if case.get("precision"):
            assert found["losses"] == sorted(found["losses"], reverse=True), (name, found)
            assert found["loss"] < 2e-3, (name, found)
            assert found["norm"] < 5e-2, (name, found)
        else:
            assert found["loss"] < 1e-5, (name, found)
            assert found["norm"] < 1e-5, (name, found)
            # Adam divides by gradients' sizes, and so enlarges what rounding does to small ones.
            assert found["weights"] < 1e-4, (name, found)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    """Four ranks, whose checkpoint later runs resume from."""
    folder = tmp_path_factory.mktemp("four")
    return train(folder, FOUR, 4, folder / "checkpoints"), folder / "checkpoints"


def test_four_ranks(four: tuple[Report, Path]) -> None:
    assert_equal(four[0], FOUR)


@pytest.mark.parametrize(
    ("world", "cases"), [(1, ONE), (2, TWO), (8, EIGHT)], ids=["one", "two", "eight"]
)
def test_ranks(
    world: int, cases: dict[str, Any], four: tuple[Report, Path], tmp_path: Path
) -> None:
    assert_equal(train(tmp_path, cases, world, four[1]), cases)
