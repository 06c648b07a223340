"""Models that predict further tokens (MTP)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtrain.diagnostics import UsageError
from dtrain.parallelism.backends import BACKENDS, refusals
from dtrain.parallelism.cost.speed import flop_per_token
from dtrain.parallelism.cost.stages import (
    kinds_of_stages,
    parameters_of_stage,
    stage_layers,
)
from dtrain.parallelism.model.further import (
    further_layers,
    most_stages,
    with_further_tokens,
)
from dtrain.parallelism.model.models import model
from dtrain.planning.question import pose
from dtrain.planning.request import PlanRequest
from dtrain.runtime.layout import Layout
from planner.published.rows import number, rows
from planner.published.runs import run_of
from validate_planner import RUNS, UNSEEN

DEEPSEEK = model("deepseek-v3")
FURTHER = with_further_tokens(DEEPSEEK, 1)


def test_parameters_are_those_of_deepseek() -> None:
    """Its README: 685B with 14B of MTP, which has copies of the embedding and the output layer."""
    added = FURTHER.parameters - DEEPSEEK.parameters
    assert added == (
        DEEPSEEK.layer_parameters(moe=True) + 2 * DEEPSEEK.hidden**2 + 3 * DEEPSEEK.hidden
    )
    copies = DEEPSEEK.embedding_parameters + DEEPSEEK.head_parameters
    assert (added + copies) / 1e9 == pytest.approx(14, abs=1)
    assert (FURTHER.parameters + copies) / 1e9 == pytest.approx(685, abs=1)


def test_flops_are_those_that_publishers_print() -> None:
    """Their FLOP/s and tokens/s give the FLOPs of a token."""
    compared = 0
    for path in (*RUNS, *UNSEEN.values()):
        for row in rows(path):
            tflops = number(row, "reported_tflops_per_gpu")
            tokens = number(row, "reported_tokens_per_s_per_gpu")
            if "MTP " not in row.get("notes", "") or not tflops or not tokens:
                continue
            printed = tflops * 1e12 / tokens
            assert printed == pytest.approx(
                flop_per_token(run_of(row).shape, causal=True), rel=0.02
            )
            compared += 1
    assert compared > 40


def test_layers_are_those_of_the_model() -> None:
    dense, moe, further = (kind for kind, _ in FURTHER.kinds)
    assert [count for _, count in FURTHER.kinds] == [3, 58, 1]
    assert (dense.experts, dense.ffn_hidden) == (0, DEEPSEEK.dense_ffn_hidden)
    assert replace(further, parts=()) == moe
    # Layers of Nemotron 3 are attention or experts alone.
    first, second = with_further_tokens(model("nemotron-3-super"), 2).pattern[-2:]
    assert first.heads and not first.ffn_hidden
    assert second.experts and not second.heads


def test_longer_sequences_predict_as_much() -> None:
    assert FURTHER.target_len == 2 * FURTHER.seq_len
    longer = FURTHER.with_lengths(2 * FURTHER.seq_len, FURTHER.vocab)
    assert longer == with_further_tokens(DEEPSEEK.with_lengths(longer.seq_len, longer.vocab), 1)


@pytest.mark.parametrize("tied", [False, True])
def test_last_stage_has_a_copy_of_the_embedding(tied: bool) -> None:
    shapes = [replace(shape, tied=tied) for shape in (DEEPSEEK, FURTHER)]
    layout = Layout(backend="megatron", pipeline=2, data=1)
    last = [
        sum(parameters_of_stage(one, layout, stage_layers(one, layout)[1], 1)) for one in shapes
    ]
    alone = Layout(backend="megatron", data=1)
    whole = [sum(parameters_of_stage(one, alone, one.layers, 0)) for one in shapes]
    counts = [stage_layers(one, layout)[1] for one in shapes]
    layer = (counts[1] - 1 - counts[0]) * DEEPSEEK.layer_parameters(moe=True)
    copy = 0 if tied else DEEPSEEK.embedding_parameters
    assert last[1] - last[0] == whole[1] - whole[0] + layer + copy


@pytest.mark.parametrize(
    ("name", "count"), [("nemotron-3-super", 1), ("deepseek-v3", 2), ("llama-3.2-1b", 3)]
)
def test_last_stage_has_all_layers_that_predict_further_tokens(name: str, count: int) -> None:
    shape = with_further_tokens(model(name), count)
    layers = shape.pattern[-further_layers(shape) :]
    assert len(layers) == count * (2 if "nemotron" in name else 1)
    for pipeline in range(2, most_stages(shape) + 1):
        for pieces in range(1, most_stages(shape) // pipeline + 1):
            layout = Layout(backend="megatron", pipeline=pipeline, virtual_pipeline=pieces, data=1)
            *others, last = kinds_of_stages(shape, layout)
            assert layers[0] in last and not any(layers[0] in stage for stage in others)
            counts = stage_layers(shape, layout)
            assert counts[-1] >= further_layers(shape) and sum(counts) == shape.layers
            assert min(counts) > 0


def test_more_stages_than_pieces_are_refused() -> None:
    # The last of 17 stages has all three.
    asked = PlanRequest(model="llama-3.2-1b", mtp=3, gpus=18, gpus_per_host=1, global_batch=18)
    with pytest.raises(UsageError, match="`pipeline=18` is more stages than the 17"):
        pose(replace(asked, fixed={"pipeline": 18})).answer()


def test_interleaved_pipelines_are_considered_as_without_further_tokens() -> None:
    asked = PlanRequest(model="llama-3-8b", gpus=16, gpu="h100", backend="megatron")
    asked = replace(asked, fixed={"pipeline": 4, "tensor": 1, "micro_batch": 1})
    plans = [pose(replace(asked, mtp=count)).search() for count in (0, 1)]
    found = [{each.layout.virtual_pipeline for each in plan.layouts} for plan in plans]
    assert found[0] == found[1]


def test_only_megatron_has_them() -> None:
    for name in BACKENDS:
        found = [*refusals(FURTHER, Layout(backend=name, data=8), "bf16")]
        assert ("predictions of further tokens (MTP)" in found) == (name != "megatron")


def test_a_request_names_the_number() -> None:
    asked = pose(PlanRequest(model="deepseek-v3", mtp=1, gpus=256, gpu="h100"))
    assert asked.shape == FURTHER


def test_adapters_and_tensorflow_do_not_go_with_further_tokens() -> None:
    asked = PlanRequest(model="llama-3-8b", mtp=1, gpus=8)
    with pytest.raises(UsageError, match="`mtp=1` does not go with `lora_rank`"):
        pose(replace(asked, lora_rank=8))
    # A model without adapters has none without further tokens either.
    with pytest.raises(UsageError, match="`lora_rank=8`") as caught:
        pose(replace(asked, lora_rank=8, model="nemotron-3-super"))
    assert caught.value.hint == "leave it out, or choose another model"
    with pytest.raises(UsageError, match="`mtp` applies only to torch"):
        pose(replace(asked, framework="tensorflow"))


@pytest.mark.parametrize(
    ("name", "count", "reason"),
    [
        ("deepseek-v3", 9, "is not a number of tokens"),
        ("deepseek-v3", -1, "is not a number of tokens"),
        ("t5-3b", 1, "does not predict the next token"),
        ("bert-large", 1, "does not predict the next token"),
    ],
)
def test_impossible_numbers_are_refused(name: str, count: int, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        with_further_tokens(model(name), count)
