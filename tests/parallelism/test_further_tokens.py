"""Models that predict further tokens (MTP)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtrain.diagnostics import UsageError
from dtrain.parallelism.backends import BACKENDS, refusals
from dtrain.parallelism.cost.speed import flop_per_token
from dtrain.parallelism.cost.stages import parameters_of_stage, stage_layers
from dtrain.parallelism.model.further import with_further_tokens
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


def test_only_megatron_has_them() -> None:
    for name in BACKENDS:
        found = [*refusals(FURTHER, Layout(backend=name, data=8), "bf16")]
        assert ("predictions of further tokens (MTP)" in found) == (name != "megatron")


def test_a_request_names_the_number() -> None:
    asked = pose(PlanRequest(model="deepseek-v3", mtp=1, gpus=256, gpu="h100"))
    assert asked.shape == FURTHER


def test_adapters_and_tensorflow_do_not_go_with_further_tokens() -> None:
    asked = PlanRequest(model="llama-3-8b", mtp=1, gpus=8)
    with pytest.raises(UsageError, match="`lora_rank=8`") as caught:
        pose(replace(asked, lora_rank=8))
    assert caught.value.hint == "leave it out, or `mtp`"
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
