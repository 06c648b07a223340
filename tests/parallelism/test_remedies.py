"""What a plan advises: other constraints, other states, other batches."""

from __future__ import annotations

import re

import pytest

from dtrain.parallelism.answer.alternatives import rivals
from dtrain.parallelism.answer.explain import headline
from dtrain.parallelism.answer.remedies import remedies
from dtrain.planning.question import pose
from dtrain.planning.request import PlanRequest


def advice(**asked: object) -> tuple[str, ...]:
    return remedies(pose(PlanRequest(**asked)).answer())  # type: ignore[arg-type]


def test_the_only_constraint_is_named_once() -> None:
    small = {"model_size": "3B", "gpus": 1, "gpu": "rtx-4090"}
    texts = advice(**small, fixed={"offload": False})
    assert sum("optimizer offloaded fits" in text for text in texts) == 1
    assert any(text.startswith("With `offload=True`") for text in texts)
    # Without any constraint, another layout is faster.
    texts = advice(
        model="llama-3-70b", gpus=16, gpu="a100-80gb",
        fixed={"offload": False, "recompute": "none"},
    )  # fmt: skip
    assert sum(text.startswith("Without the constraints") for text in texts) == 1
    assert sum(text.startswith("With `offload=True`") for text in texts) == 1


@pytest.mark.parametrize(
    ("asked", "fewer"),
    [
        ({"model_size": "1.5B", "gpus": 1, "gpu": "rtx-3090"}, True),
        ({"model_size": "1.5B", "gpus": 1, "gpu": "rtx-3090", "backend": "runtime"}, True),
        # Adapters have few states, and V100s no bf16.
        ({"model_size": "70B", "gpus": 1, "gpu": "h100", "lora_rank": 16}, False),
        ({"model_size": "3B", "gpus": 1, "gpu": "v100-32gb"}, False),
    ],
)
def test_states_of_16_bits_are_suggested_where_they_fit(
    asked: dict[str, object], fewer: bool
) -> None:
    texts = advice(**asked)
    (text,) = [one for one in texts if "`state_bits=16`" in one] or [""]
    assert bool(text) == fewer
    assert texts
    if fewer:
        assert ("`backend='torchtitan'`" in text) == ("backend" in asked)
        again = PlanRequest(**asked | {"state_bits": 16, "backend": "torchtitan"})  # type: ignore[arg-type]
        best = pose(again).answer().best
        assert best.fits and not best.layout.offload
        assert f"{best.memory.total:.1f} GiB" in text


def test_one_host_alone_has_the_same_constraints() -> None:
    """Two hosts with a fast network are slow only because of the constraint."""
    for fixed in ({"tensor": 16}, {"sharding": "none", "tensor": 1, "pipeline": 1}):
        asked = PlanRequest(model="llama-3-8b", gpus=16, gpu="a100-80gb", fixed=fixed)
        assert not any(one.name == "One host alone" for one in rivals(pose(asked).answer()))


def test_a_frozen_model_is_kept_and_its_adapters_trained() -> None:
    asked = PlanRequest(model="llama-3-8b", gpus=1, gpu="h100", lora_rank=16)
    text = headline(pose(asked).answer().best)
    assert text.startswith("Keep the whole model on one GPU, and train its adapters. ")


def test_ranks_of_one_sequence_shard_the_states_of_the_model() -> None:
    asked = PlanRequest(model="llama-3-8b", gpus=16, gpu="h100", global_batch=1)
    text = headline(pose(asked).answer().best)
    assert re.search(r"\(context parallelism\), and shard gradients and optimizer states", text)
