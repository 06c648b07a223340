"""Time of layers with experts: where experts are, and what waits for the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtrain.parallelism.assumptions import UNTRAINED, Assumptions, MemoryHabits
from dtrain.parallelism.backends import BACKENDS
from dtrain.parallelism.cluster.efficiency import of_family
from dtrain.parallelism.cluster.hardware import GpuCluster
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.parallelism.cost.activations import layer_activations
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.cost.launches import launches
from dtrain.parallelism.cost.layer import Kernels
from dtrain.parallelism.cost.memory import memory
from dtrain.parallelism.cost.step_time import StepTime
from dtrain.parallelism.model.adapters import Lora
from dtrain.parallelism.model.models import model
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import BackendName, Layout

WHOLE, PARTS = Assumptions(), Assumptions(whole_experts=False)


def time_of(
    shape: str | Shape,
    layout: Layout,
    assumed: Assumptions = WHOLE,
    *,
    kind: str = "h100-80gb",
    **own: Any,
) -> StepTime:
    chosen = hardware().gpu(kind)
    cluster = GpuCluster(chosen, layout.world_size, min(8, layout.world_size), 400.0)
    efficiency = replace(of_family(chosen.family), **own)
    shape = model(shape) if isinstance(shape, str) else shape
    return Candidate(shape, layout, cluster, efficiency, assumed).time


def split(tensor: int, expert: int, data: int = 8, **own: Any) -> Layout:
    return Layout(
        backend="megatron", tensor=tensor, expert=expert, data=data, sharding="optimizer",
        sequence_parallel=tensor > 1, **own,
    )  # fmt: skip


def test_whole_experts_need_no_sum_over_tensor_ranks() -> None:
    """Attention has one of a layer's two sums, and parts of experts gather copies of tokens."""
    layout = split(4, 2)
    whole, parts = (time_of("mixtral-8x7b", layout, one).tensor for one in (WHOLE, PARTS))
    dense = time_of("llama-3-8b", layout).tensor
    assert whole == pytest.approx(dense / 2, rel=0.02)  # the same widths and layers
    # Two copies of each token take as long as two sums, but start only once.
    assert parts == pytest.approx(whole + dense, rel=0.1)
    assert parts < whole + dense


def test_experts_compute_the_tokens_of_their_capacity() -> None:
    """DeepSeek-V3 on 64 MI355X in MaxText took 29.9 s with 10 sequences on each GPU: masks of each
    sequence's tokens and places take more FLOP than its experts."""
    layout = Layout(data=64, expert=8, sharding="full", micro_batch=10, recompute="full")
    assumed = Assumptions(
        narrow_states=True, fp32_gradients=False, capacity=1.25, masks_experts=True
    )
    masked = time_of("deepseek-v3", layout, assumed, kind="mi355x")
    assert masked.total == pytest.approx(29.9, rel=0.1)
    sent = time_of("deepseek-v3", layout, replace(assumed, masks_experts=False), kind="mi355x")
    assert masked.compute > 1.4 * sent.compute
    even = time_of("deepseek-v3", layout, replace(assumed, capacity=1.0), kind="mi355x")
    assert masked.compute > even.compute


def test_tensors_of_one_size_have_room_for_all_copies_of_all_tokens() -> None:
    """DeepSeek-V3 on 64 MI355X in MaxText took 27.0 s with 6 dropless sequences on each GPU, and
    ran out of memory with 8. With DeepEP, which sends a token once, 9 fitted, and 12 did not."""
    sent = Assumptions(
        narrow_states=True, fp32_gradients=False, uneven=UNTRAINED, room_for_all=True,
        habits=MemoryHabits(foreach=False, placed=True),
    )  # fmt: skip
    exact = replace(sent, room_for_all=False)

    def of(batch: int, assumed: Assumptions) -> Candidate:
        layout = Layout(
            backend="megatron", expert=8, data=64, sharding="full", micro_batch=batch,
            recompute="full",
        )  # fmt: skip
        cluster = GpuCluster(hardware().gpu("mi355x"), 64, 8, 3200.0)
        shape = model("deepseek-v3")
        return Candidate(shape, layout, cluster, of_family(cluster.gpu.family), assumed)

    assert of(6, exact).time.total < 0.8 * of(6, sent).time.total < 27.0
    assert of(12, exact).fits
    assert [of(batch, sent).fits for batch in (6, 8)] == [True, False]
    once = replace(sent, sends_copies=False)
    assert [of(batch, once).fits for batch in (9, 12)] == [True, False]
    # Two sequences on one rank of experts have no other rank's tokens.
    alone, shape = Layout(backend="megatron", data=64, sharding="full"), model("deepseek-v3")
    assert sent.empty(shape, alone) == 0
    # A rank with 4 experts gets at most 4 of a token's 8 copies.
    few = replace(alone, expert=64)
    assert sent.empty(shape, few) == pytest.approx(8 * (32 - sent.busiest(shape, few)))


def test_a_loop_over_experts_starts_kernels_for_each_expert_that_a_rank_holds() -> None:
    def started(expert: int, kernels: int) -> float:
        layout = Layout(expert=expert, data=8, recompute="full")
        return launches(model("qwen3-30b-a3b"), layout, Assumptions(expert_kernels=kernels))

    for expert in (1, 8):
        # The forward pass, its repetition, and a backward pass of 1.6 times as many.
        added = started(expert, 5) - started(expert, 0)
        assert added == pytest.approx(128 / expert * 5 * 3.6)
    assert started(1, 0) == started(8, 0)


def test_dtrain_runtime_loops_over_experts() -> None:
    loops = {
        backend: Assumptions.usual("bf16", hardware().gpu("h100-80gb"), backend).expert_kernels
        for backend in BACKENDS
    }
    assert loops == {"runtime": 5, "megatron": 0, "torchtitan": 0}


def test_whole_experts_are_larger_products() -> None:
    shape, layout = model("mixtral-8x7b"), split(4, 2)
    cluster = GpuCluster(hardware().gpu("h100-80gb"), 32, 8, 400.0)
    whole, parts = (
        Kernels(of_family("hopper"), cluster, shape, layout, one) for one in (WHOLE, PARTS)
    )
    assert whole.weights_forward(moe=True) < parts.weights_forward(moe=True)
    held = [sum(one.weights for one in each._products(moe=True)) for each in (whole, parts)]
    assert held[0] == held[1]
    # Eight experts cannot be whole on 16 ranks.
    assert not WHOLE.spreads_experts(shape, split(4, 4))


def test_whole_experts_are_closer_to_their_tokens() -> None:
    """Eight GPUs of one host hold whole experts, or eight of four hosts one part of each."""
    whole = time_of("qwen3-235b-a22b", split(4, 2), WHOLE).expert
    assert 0 < whole < time_of("qwen3-235b-a22b", split(4, 8), PARTS).expert / 2


@pytest.mark.parametrize("micro_batch", [1, 8])
def test_layers_with_experts_wait_for_the_host(micro_batch: int) -> None:
    layout = split(1, 8, micro_batch=micro_batch)
    some, none = (time_of("mixtral-8x7b", layout, stalls=share).host for share in (0.4, 0.0))
    assert some > none
    # The wait belongs to the kernels, not to the tokens.
    every = [time_of("mixtral-8x7b", replace(layout, micro_batch=m)).host for m in (4, 8)]
    assert every[0] == pytest.approx(every[1])
    assert time_of("llama-3-8b", layout).host == time_of("llama-3-8b", layout, stalls=0.9).host


def test_a_dispatcher_counts_more_than_its_backend() -> None:
    layout = replace(split(1, 16, 16), backend="torchtitan")
    usual = time_of("qwen3-30b-a3b", layout).expert
    apart, once = (
        time_of("qwen3-30b-a3b", layout, Assumptions(sends_copies=copies)).expert
        for copies in (True, False)
    )
    assert once < apart == usual


def test_tpus_pad_heads_and_do_not_wait_for_the_host() -> None:
    layout = split(1, 8)
    assert time_of("gpt-oss-20b", layout, kind="tpu-v5p").host == 0
    padded, exact = (
        time_of("gpt-oss-20b", layout, kind="tpu-v5p", head_multiple=size).compute
        for size in (128, 64)
    )
    assert padded > exact
    alike = [
        time_of("llama-3-8b", layout, kind="tpu-v5p", head_multiple=size).compute
        for size in (128, 64)
    ]
    assert alike[0] == alike[1]  # heads of 128


def test_ranks_wait_for_the_one_whose_experts_get_the_most_tokens() -> None:
    shape = model("qwen3-30b-a3b")
    few, many = split(1, 2), split(1, 8)
    real = Assumptions(uneven=UNTRAINED)
    assert WHOLE.busiest(shape, many) == real.busiest(shape, split(1, 1)) == 1
    assert 1 < real.busiest(shape, few) < real.busiest(shape, many) < 8
    # All tokens of Mixtral choose two of eight experts, so one gets four times its share at most.
    assert 2 < real.busiest(model("mixtral-8x7b"), many) < 4
    again = replace(many, recompute="full")
    even, uneven = (memory(shape, again, one).temporary for one in (WHOLE, real))
    assert even < uneven < even * real.busiest(shape, many)
    even, uneven = (time_of("qwen3-30b-a3b", many, one) for one in (WHOLE, real))
    assert uneven.expert == pytest.approx(even.expert * real.busiest(shape, many), rel=0.05)
    assert even.compute < uneven.compute < even.compute * real.busiest(shape, many)


def test_selective_recompute_of_torchtitan_repeats_grouped_products() -> None:
    """It keeps the tokens that ranks exchange, unless it exchanges them again."""
    shape, h = model("qwen3-30b-a3b"), model("qwen3-30b-a3b").hidden
    layout = Layout(backend="torchtitan", sharding="full", recompute="selective", expert=8, data=8)
    again = Assumptions(habits=MemoryHabits(repeats_exchange=True))
    kept, repeated = (layer_activations(shape, layout, one) for one in (Assumptions(), again))
    assert kept - repeated == 4 * h * shape.experts_per_token
    # Attention's output, queries, values, the layer's input and the last product's output.
    attention = 2 * (2 * shape.heads + shape.kv_heads) * shape.head_size
    assert repeated == layer_activations(shape, replace(layout, expert=1), again)
    assert repeated == 4 * h + attention
    times = [time_of("qwen3-30b-a3b", layout, one).expert for one in (Assumptions(), again)]
    assert times[1] == pytest.approx(1.5 * times[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_copies_of_a_shard_have_the_states_of_experts_that_the_shard_has(
    backend: BackendName,
) -> None:
    """Two groups of 8 ranks with all experts are like one group, as ``num_distributed_optimizer_
    instances`` of Megatron-Core and the expert meshes of torchtitan and dtrain.runtime."""
    one = Layout(backend=backend, data=8, expert=8, sharding="full")
    two = replace(one, data=16, sharding="hybrid", shard=8)
    alone, copied = (memory(model("mixtral-8x7b"), layout, WHOLE) for layout in (one, two))
    assert copied.parameters == alone.parameters
    assert copied.optimizer == alone.optimizer
    times = [time_of("mixtral-8x7b", layout).optimizer for layout in (one, two)]
    assert times[0] == times[1]
    # Nobody else has a part of a rank's frozen experts, so nothing of them is gathered.
    adapted = replace(model("mixtral-8x7b"), lora=Lora(8))
    gathered = [time_of(adapted, layout).data for layout in (one, two)]
    assert gathered[1] == pytest.approx(gathered[0], rel=0.1)
