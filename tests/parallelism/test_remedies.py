"""What a plan advises: other constraints, other states, other batches."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from dtrain.parallelism.answer.alternatives import other_batch, rivals
from dtrain.parallelism.answer.explain import brief, headline
from dtrain.parallelism.answer.remedies import remedies
from dtrain.parallelism.answer.units import seconds
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


def test_adapters_of_attention_alone_are_suggested_where_experts_have_too_many() -> None:
    asked = {
        "model": "gpt-oss-120b", "gpus": 1, "gpu": "h100", "lora_rank": 8, "base_bits": 4,
        "seq_len": 1024, "global_batch": 8,
    }  # fmt: skip
    (text,) = (text for text in advice(**asked) if "`lora_targets='attention'`" in text)
    best = pose(PlanRequest(**asked, lora_targets="attention")).answer().best  # type: ignore[arg-type]
    assert best.fits
    assert f"{best.memory.total:.1f} GiB" in text


def test_shorter_sequences_get_the_plan_that_a_user_then_sees() -> None:
    """dtrain.runtime would need offload, and Megatron-LM takes 0.6 times as long without."""
    asked = {"model": "llama-3-8b", "gpus": 8, "gpu": "h100"}
    texts = advice(**asked, seq_len=2**19, global_batch=4)
    best = pose(PlanRequest(**asked, seq_len=2**18, global_batch=8)).answer().best  # type: ignore[arg-type]
    (text,) = (text for text in texts if text.startswith("With `seq_len=262144`"))
    assert f"`backend={best.layout.backend!r}`" in text
    assert f"{best.memory.total:.1f} GiB, {best.time.total:.0f} s a step." in text


def test_shorter_sequences_are_those_that_the_constraints_divide() -> None:
    """The shortest half, 15,625, cannot be split over 8 ranks."""
    asked = {"model": "llama-3.1-8b", "gpus": 8, "gpu": "h100", "global_batch": 8}
    texts = advice(**asked, seq_len=10**6, fixed={"context": 8})
    assert any(text.startswith("With `seq_len=250000`") for text in texts)


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
    assert re.search(r"\(context parallelism\), and shard optimizer states over 2 GPUs", text)


@pytest.mark.parametrize(
    ("gpus", "batch", "other"),
    [
        (104, 512, 520),
        (64, 1000, 1024),
        # All GPUs divide it, or enough of them.
        (104, 520, 0),
        (96, 1024, 0),
        # The next multiple is twice as many.
        (104, 52, 0),
    ],
)
def test_a_near_batch_that_all_gpus_divide_is_named_if_it_is_faster(
    gpus: int, batch: int, other: int
) -> None:
    asked = PlanRequest(model="llama-2-13b", gpus=gpus, gpu="a100-80gb", global_batch=batch)
    text = other_batch(pose(asked).answer())
    assert bool(text) == bool(other)
    if other:
        assert text.startswith(
            f"With a batch of {other:,} sequences, a multiple of the {gpus} GPUs"
        )
        step = re.search(r"([\d.]+) s a step", text)
        assert step
        best = pose(replace(asked, global_batch=other)).answer().best
        assert float(step[1]) == pytest.approx(best.time.total, rel=5e-3)
        before = pose(asked).answer().best
        assert best.time.total / other < before.time.total / batch / 1.07


def test_the_plan_for_a_near_batch_may_be_for_another_backend() -> None:
    asked = PlanRequest(
        model="bert-large", gpus=8, gpu="t4", global_batch=100,
        fixed={"sharding": "optimizer", "micro_batch": 2, "recompute": "selective"},
    )  # fmt: skip
    answer = pose(asked).answer()
    followed = pose(replace(asked, global_batch=96)).answer().best
    assert (answer.question.backend, followed.layout.backend) == ("megatron", "runtime")
    text = other_batch(answer)
    assert f"with `backend='runtime'`: {brief(followed)}, " in text
    assert text.endswith(f", {seconds(followed.time.total)} a step.")


def test_what_replaces_offload_takes_about_as_long_at_most() -> None:
    """16 RTX 4090 and 8 RTX 5090 would hold all states, but wait an hour for a slow network."""
    asked = PlanRequest(model="llama-3-8b", gpus=8, gpu="rtx-4090", gpus_per_host=1, network_gbps=1)
    answer = pose(asked).answer()
    found = [text for text in remedies(answer) if "would suffice" in text]
    assert answer.best.layout.offload and found
    for text in found:
        _, took = text.split("at most ")
        assert float(took.removesuffix(" s a step.")) < 1.5 * answer.best.time.total


def test_offload_is_suggested_with_the_backend_that_a_plan_for_it_has() -> None:
    asked = PlanRequest(model="gpt-oss-120b", gpus=8, gpu="rtx-4090", global_batch=64)
    (text,) = (text for text in remedies(pose(asked).answer()) if text.startswith("Offload needs"))
    followed = pose(replace(asked, fixed={"offload": True})).answer().best
    assert "with `offload=True` and `backend='torchtitan'`, " in text
    assert text.endswith(f", {seconds(followed.time.total)} a step.")


@pytest.mark.parametrize(
    ("asked", "offloaded"),
    [
        # It suffices where offload is the plan, or goes with it.
        ({"model": "mistral-nemo-12b", "gpu": "l40s", "seq_len": 2**17, "global_batch": 8}, False),
        ({"model": "llama-3-8b", "gpu": "h100", "seq_len": 2**20, "global_batch": 2}, True),
    ],
)
def test_a_loss_in_parts_with_and_without_offload(
    asked: dict[str, object], offloaded: bool
) -> None:
    (text,) = (text for text in advice(**asked, gpus=8) if "`ChunkedCELoss`" in text)
    assert ("optimizer offloaded" in text) == offloaded
