"""Models whose layers differ: their files, their layers in stages, and who can train them."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from dtrain.diagnostics import UsageError
from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.backends import BACKENDS, refusals
from dtrain.parallelism.cluster.efficiency import of_family
from dtrain.parallelism.cluster.hardware import GpuCluster
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.parallelism.constraints import check_sizes
from dtrain.parallelism.cost import step_time
from dtrain.parallelism.cost.activations import layer_activations, routed_gradients
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.cost.products import grouped
from dtrain.parallelism.cost.sharded_memory import Rank
from dtrain.parallelism.cost.stages import kinds_of_stages, parameters_of_stage, stage_layers
from dtrain.parallelism.model.flop import attention_flop
from dtrain.parallelism.model.huggingface import shape_from_config
from dtrain.parallelism.model.mixers import DeltaNet, Mamba2
from dtrain.parallelism.model.models import model, models
from dtrain.parallelism.model.parts import CrossAttention, OutputGate
from dtrain.parallelism.model.shape import Shape
from dtrain.planning.question import pose
from dtrain.planning.request import PlanRequest
from dtrain.runtime.layout import BackendName, Layout

LAYERED = [known.name for known in models() if known.shape.pattern]
NEW = [known.name for known in models() if known.shape.every_part]

MAVERICK = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 8192, "intermediate_size_mlp": 16384, "vocab_size": 202048,
        "num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
    },
}  # fmt: skip
JAMBA_LIKE = {
    "model_type": "granitemoehybrid", "num_hidden_layers": 4, "hidden_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32,
    "shared_intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
    "vocab_size": 100, "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_d_state": 16, "mamba_n_groups": 1,
    "mamba_expand": 2, "full_attention_interval": 4, "moe_latent_size": 0,
}  # fmt: skip
SMALL: tuple[dict[str, Any], ...] = (
    JAMBA_LIKE,
    {
        **JAMBA_LIKE, "model_type": "nemotron_h", "hybrid_override_pattern": "M-*E",
        "moe_latent_size": 16,
    },
    {
        **JAMBA_LIKE, "model_type": "qwen3_next", "layer_types": None, "linear_num_key_heads": 2,
        "linear_key_head_dim": 16, "linear_num_value_heads": 4, "linear_value_head_dim": 16,
    },
    {
        "model_type": "t5", "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2,
        "num_decoder_layers": 3, "vocab_size": 100, "dropout_rate": 0.0,
    },
    {
        "_class_name": "FluxTransformer2DModel", "num_layers": 2, "num_single_layers": 3,
        "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4,
        "joint_attention_dim": 8, "pooled_projection_dim": 8, "guidance_embeds": True,
    },
    {"ssm_cfg": {"layer": "Mamba2"}, "d_model": 64, "n_layer": 2, "vocab_size": 100},
    {
        "model_type": "deepseek_v4", "num_hidden_layers": 3, "hidden_size": 64, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 100, "q_lora_rank": 8,
        "o_groups": 2, "o_lora_rank": 8, "sliding_window": 4, "index_topk": 2, "index_n_heads": 2,
        "index_head_dim": 8, "hc_mult": 2, "compress_ratios": [0, 4, 128],
        "layer_types": None, "compress_rates": {"compressed_sparse_attention": 2},
        "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    },
)  # fmt: skip


def read(config: dict[str, Any]) -> Shape:
    return shape_from_config(json.dumps(config), "config.json")


def candidate(shape: Shape, layout: Layout, chosen: str = "h100-80gb") -> Candidate:
    kind = hardware().gpu(chosen)
    cluster = GpuCluster(kind, layout.world_size, min(8, layout.world_size), 400.0)
    return Candidate(shape, layout, cluster, of_family(kind.family), Assumptions())


def test_layers_are_where_the_file_has_them() -> None:
    shape = model("nemotron-h-8b")
    words = {Mamba2: "M"}
    found = "".join(
        words[type(one.parts[0])] if one.parts else "*" if one.heads else "-"
        for one in shape.pattern
    )
    assert found == "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    shape = model("qwen3-next")
    every = [tuple(type(part) for part in one.parts) for one in shape.pattern]
    assert every == [(DeltaNet,), (DeltaNet,), (DeltaNet,), (OutputGate,)] * 12
    assert all(one.experts == 512 for one in shape.pattern)
    shape = model("t5-11b")
    assert [bool(one.parts) for one in shape.pattern] == [False] * 24 + [True] * 24


def test_experts_are_in_every_second_layer_of_llama_4_maverick() -> None:
    shape = read(MAVERICK)
    assert [one.experts for one in shape.pattern] == [0, 128] * 24
    assert {one.ffn_hidden for one in shape.pattern if not one.experts} == {16384}
    known = model("llama-4-maverick")
    assert shape.parameters == known.parameters
    assert shape.active_parameters == known.active_parameters
    # A stage of one layer has the experts of its own layer.
    layout = Layout(backend="megatron", pipeline=48)
    with_experts = [bool(parameters_of_stage(shape, layout, 1, stage)[1]) for stage in range(48)]
    assert with_experts == [False, True] * 24
    # Its layers all have attention and an MLP, which dtrain.runtime trains.
    assert not [*refusals(shape, Layout(backend="runtime", data=8), "bf16")]


def test_longer_sequences_lengthen_the_decoders_too() -> None:
    shape = model("t5-11b").with_lengths(1024, 32128)
    assert {one.seq_len for one in shape.pattern} == {1024, 228}
    assert shape.target_len == 228
    cross = [part for part in shape.every_part if isinstance(part, CrossAttention)]
    assert [(part.source, part.target) for part in cross] == [(1024, 228)]


@pytest.mark.parametrize("name", LAYERED)
@pytest.mark.parametrize(("pipeline", "pieces"), [(1, 1), (2, 1), (4, 3), (8, 2)])
def test_stages_share_the_layers_out(name: str, pipeline: int, pieces: int) -> None:
    shape = model(name)
    if pipeline * pieces > shape.layers:
        pieces = 1
    layout = Layout(backend="megatron", pipeline=pipeline, virtual_pipeline=pieces)
    stages = kinds_of_stages(shape, layout)
    for kind, count in shape.kinds:
        assert sum(stage.get(kind, 0) for stage in stages) == count
    assert stage_layers(shape, layout) == tuple(sum(stage.values()) for stage in stages)
    every = [parameters_of_stage(shape, layout, 0, stage) for stage in range(pipeline)]
    whole = sum(map(sum, every))
    ends = shape.head_parameters if shape.tied and pipeline > 1 else 0
    assert whole == pytest.approx(shape.parameters + ends, rel=1e-4)  # the last norm


def test_stages_of_an_encoder_and_a_decoder_take_equally_long() -> None:
    # A decoder's layer has more parameters, but fewer tokens.
    shape = model("t5-11b")
    counts = stage_layers(shape, Layout(backend="megatron", pipeline=4))
    assert counts[0] < counts[-1]
    times = [
        sum(count * kind.layer_flop * kind.seq_len for kind, count in stage.items())
        for stage in kinds_of_stages(shape, Layout(backend="megatron", pipeline=4))
    ]
    assert max(times) < 1.2 * min(times)


def test_a_long_sequence_costs_state_space_layers_less_than_attention() -> None:
    hybrid, dense = model("nemotron-h-8b"), model("llama-3-8b")
    layout = Layout(backend="megatron", data=8, recompute="full", sharding="optimizer")

    def growth(shape: Shape) -> float:
        times = [
            candidate(shape.with_lengths(length, shape.vocab), layout).time.total
            for length in (4096, 65536)
        ]
        return times[1] / times[0] / 16

    assert growth(hybrid) < 1.3 < growth(dense)


@pytest.mark.parametrize("name", NEW)
def test_each_new_model_has_a_plan_for_another_backend(name: str) -> None:
    layout = Layout(backend="runtime", data=64)
    assert next(refusals(model(name), layout, "bf16"))
    gpus = 64 if model(name).parameters < 1e11 else 1024
    # One value of recomputation is a third of the search.
    fixed = {"recompute": "full"}
    answer = pose(PlanRequest(model=name, gpus=gpus, gpu="h100-80gb", fixed=fixed)).answer()
    assert answer.fits
    assert answer.best.layout.backend != "runtime"
    assert "because the backend runtime does not support" in answer.notes[-1]
    needed = answer.best.memory.allocated * 2**30 * answer.best.layout.world_size
    assert needed > 16 * model(name).parameters


@pytest.mark.parametrize(
    ("name", "backends"),
    [
        ("nemotron-h-8b", {"megatron"}),
        ("qwen3-next", {"megatron"}),
        ("t5-3b", {"megatron"}),
        ("flux-12b", {"megatron", "torchtitan"}),
    ],
)
def test_backends_train_the_parts_that_they_have(name: str, backends: set[BackendName]) -> None:
    able = {
        backend
        for backend in BACKENDS
        if not [*refusals(model(name), Layout(backend=backend, data=8), "bf16")]
    }
    assert able == backends


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (PlanRequest(model="t5-3b", gpus=8, lora_rank=8), "adapters only for stacks"),
        (PlanRequest(model="dit-xl-2", gpus=8, framework="tensorflow"), "only for stacks"),
        (PlanRequest(model="qwen3-next", gpus=8, backend="runtime"), "linear attention"),
    ],
)
def test_what_no_plan_can_do_is_refused(request_: PlanRequest, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        pose(request_).answer()
    assert caught.value.hint


def test_sparse_attention_computes_the_chosen_keys_only() -> None:
    sparse, whole = model("deepseek-v3.2"), model("deepseek-v3")
    assert sum(not one.experts for one in sparse.pattern[:3]) == 3
    added = sparse.parameters - whole.parameters
    assert added == 61 * (1536 * 64 * 128 + 7168 * (128 + 64) + 2 * 128)
    for length in (1024, 2048, 4096, 65536):
        few, many = (attention_flop(one.with_lengths(length, 129280), causal=True)
                     for one in (sparse, whole))  # fmt: skip
        keys = sum(min(place, 2048) for place in range(length)) / length
        assert few == pytest.approx(keys / (length / 2) * many, rel=1e-3)
    assert [part.length for part in sparse.with_lengths(65536, 129280).every_part] == [65536] * 2


@pytest.mark.parametrize(
    ("name", "window", "every"), [("gemma-3-12b", 1024, 6), ("gpt-oss-120b", 128, 2)]
)
def test_a_sliding_window_shortens_attention_in_the_layers_that_have_it(
    name: str, window: int, every: int
) -> None:
    for length in (512, 8192, 32768):
        known = model(name).with_lengths(length, 1000)
        whole = attention_flop(replace(known, attended=0), causal=True)
        seen = sum(min(place, window) for place in range(length)) / length / (length / 2)
        mean = (1 + (every - 1) * seen) / every
        assert attention_flop(known, causal=True) / whole == pytest.approx(mean, rel=5e-3)


def test_attention_in_chunks_sees_the_tokens_of_a_chunk() -> None:
    for length in (8192, 32768, 1048576):
        known = model("llama-4-scout").with_lengths(length, 1000)
        whole = attention_flop(replace(known, attended=0), causal=True)
        seen = min(8192, length) / length
        assert attention_flop(known, causal=True) / whole == pytest.approx((1 + 3 * seen) / 4)


def test_experts_on_a_latent_compute_and_exchange_its_elements() -> None:
    kind = next(one for one in model("nemotron-3-super").pattern if one.experts)
    assert (kind.hidden, kind.expert_width) == (4096, 1024)
    assert kind.expert_parameters == 2 * 1024 * 2688
    wide = replace(kind, parts=())
    layout = Layout(backend="megatron", data=8, expert=8, sharding="optimizer")
    narrow_flop, wide_flop = (
        sum(one.flop for one in grouped(each, layout, copies=22, whole=False))
        for each in (kind, wide)
    )
    assert narrow_flop == wide_flop / 4
    narrow_time, wide_time = (candidate(each, layout).time.expert for each in (kind, wide))
    assert narrow_time == pytest.approx(wide_time / 4, rel=0.1)


def test_experts_on_a_latent_hold_its_elements_in_the_backward_pass() -> None:
    shape = model("nemotron-3-super")
    kind = next(one for one in shape.pattern if one.experts)
    layout = Layout(backend="megatron", data=8, expert=8, sharding="optimizer")
    whole, alone = (routed_gradients(one, layout, Assumptions()) for one in (shape, kind))
    assert whole == alone == 2 * 22 * (2688 + 2 * 1024)


def test_any_mixture_may_have_experts_on_a_latent() -> None:
    mixed = {**JAMBA_LIKE, "moe_latent_size": 16}
    for kind in {*read(mixed).pattern}:
        assert kind.expert_parameters == 3 * 16 * 32
    dense = {**mixed, "num_local_experts": 0}
    assert read(dense) == read({**dense, "moe_latent_size": 0})


def test_all_residual_streams_are_kept_and_sent() -> None:
    shape = model("deepseek-v4-flash")
    alone = replace(
        shape, pattern=tuple(replace(one, parts=one.parts[:1]) for one in shape.pattern)
    )
    assert (shape.streams, alone.streams) == (4, 1)
    layout = Layout(backend="megatron", pipeline=2, grad_accumulation=4, recompute="full")
    four, one = (
        layer_activations(each.pattern[0], layout, Assumptions()) for each in (shape, alone)
    )
    assert four == 4 * one == 4 * 2 * 4096
    four, one = (candidate(each, layout).time.pipeline for each in (shape, alone))
    assert four == pytest.approx(4 * one, rel=0.1)
    # A layer in its backward pass has what it keeps of all streams, and two gradients of each.
    four, one = (candidate(each, layout).memory.temporary for each in (shape, alone))
    assert four - one == pytest.approx((2 * 2 * 5 + 2 * 2 * 3) * 4096 * 4096 / 2**30)
    four, one = (Rank(each, layout, Assumptions(), 0, 22).stream for each in (shape, alone))
    assert four == 4 * one


def test_tensor_ranks_divide_groups_and_heads_of_all_layers() -> None:
    shape = model("nemotron-h-8b")
    assert set(shape.tensor_units) == {32, 21504, 128, 8}
    request = PlanRequest(model="nemotron-h-8b", gpus=32, gpus_per_host=32, fixed={"tensor": 16})
    with pytest.raises(UsageError, match="of other layers"):
        pose(replace(request, gpu="h100-80gb")).answer()


@pytest.mark.parametrize("place", range(len(SMALL)))
def test_hostile_files_of_each_format(place: int) -> None:
    hostile = (None, True, 0, -1, 1e30, 10**8, 0.5, "", "x", [], {}, ["mamba", {}], "M" * 5000)
    chance = random.Random(place)
    read(SMALL[place])
    for _ in range(300):
        config = copy.deepcopy(SMALL[place])
        config[chance.choice([*config])] = chance.choice(hostile)
        try:
            check_sizes(shape := read(config), 8)
            assert shape.parameters > 0
        except UsageError as error:
            assert error.hint


def test_the_time_of_several_layers_is_summed_part_by_part() -> None:
    layer = step_time._Layer(*map(float, range(8)))
    assert step_time._summed([(layer, 2), (layer, 1)]) == tuple(3.0 * n for n in range(8))
