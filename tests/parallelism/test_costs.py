"""Properties of layout costs that hold for all constants."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dtrain.parallelism.assumptions import COMMUNICATOR, Assumptions, MemoryHabits
from dtrain.parallelism.cluster.efficiency import of_family
from dtrain.parallelism.cluster.hardware import GpuCluster, Precision
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.parallelism.cost.activations import layer_activations
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.cost.collectives import Group
from dtrain.parallelism.cost.layer import Kernels
from dtrain.parallelism.cost.memory import (
    FRAGMENTATION,
    FRAGMENTATION_BY_TORCH,
    memory,
    stage_memory,
)
from dtrain.parallelism.cost.stages import parameters_of_stage, stage_layers
from dtrain.parallelism.cost.step_time import step_time
from dtrain.parallelism.model.models import model
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import BackendName, Layout, Sharding

EQUAL = ("gpt-3-175b", "llama-3-70b", "llama-3-8b", "mixtral-8x7b", "deepseek-v3", "gpt2")
MODELS = (*EQUAL, "nemotron-3-nano", "qwen3-next", "t5-3b", "flux-1-dev", "falcon-h1-7b")
ASSUMED = Assumptions()
Split = tuple[Shape, Layout, Assumptions]
POWERS = st.sampled_from([1, 2, 4, 8])


def candidate(shape: Shape, layout: Layout, assumed: Assumptions = ASSUMED) -> Candidate:
    chosen = hardware().gpu("a100-80gb")
    cluster = GpuCluster(chosen, layout.world_size, min(8, layout.world_size), 200.0)
    return Candidate(shape, layout, cluster, of_family(chosen.family), assumed)


@st.composite
def splits(draw: st.DrawFn) -> Split:
    shape = model(draw(st.sampled_from(MODELS)))
    layout = Layout(
        backend="megatron",
        tensor=draw(POWERS),
        pipeline=draw(POWERS),
        context=draw(st.sampled_from([1, 2])),
        data=draw(POWERS),
        micro_batch=draw(st.sampled_from([1, 2, 4])),
        grad_accumulation=draw(st.sampled_from([1, 4, 8, 32])),
        sharding=draw(st.sampled_from(["none", "optimizer", "gradients", "full"])),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        offload=draw(st.booleans()),
    )
    layout = replace(layout, sequence_parallel=layout.tensor > 1 and draw(st.booleans()))
    assume(shape.heads % layout.tensor == 0 and layout.pipeline <= shape.layers)
    assumed = Assumptions(
        precision=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        flash_attention=draw(st.booleans()),
    )
    return shape, layout, assumed


@given(splits())
@settings(max_examples=300, deadline=None)
def test_parts_are_not_negative_and_sum_to_the_total(
    split: Split,
) -> None:
    one = candidate(*split)
    for costs in (one.memory, one.time):
        parts = {field.name: getattr(costs, field.name) for field in fields(costs)}
        assert min(parts.values()) >= 0
        counted = [part for name, part in parts.items() if name != "cached"]
        assert sum(counted) == pytest.approx(costs.total)
    assert one.memory.allocated < one.memory.total


@given(splits())
@settings(max_examples=300, deadline=None)
def test_more_data_ranks_never_need_more_memory(split: Split) -> None:
    shape, layout, assumed = split
    assume(layout.data > 1)
    more = replace(layout, data=2 * layout.data)
    assert (
        candidate(shape, more, assumed).memory.total
        <= candidate(shape, layout, assumed).memory.total + 1e-9
    )


@given(splits())
@settings(max_examples=300, deadline=None)
def test_more_work_takes_longer_and_more_saved_needs_more(
    split: Split,
) -> None:
    shape, layout, assumed = split
    now = candidate(shape, layout, assumed)
    longer = candidate(
        shape, replace(layout, grad_accumulation=2 * layout.grad_accumulation), assumed
    )
    assert longer.time.total > now.time.total
    larger = candidate(shape, replace(layout, micro_batch=2 * layout.micro_batch), assumed)
    assert larger.memory.total >= now.memory.total
    nothing = candidate(shape, replace(layout, recompute="none"), assumed)
    everything = candidate(shape, replace(layout, recompute="full"), assumed)
    assert everything.time.total > nothing.time.total
    # A stage of one or two layers (of a kind) holds a whole layer's activations as it recomputes.
    if min([count for _, count in shape.kinds] or [shape.layers]) > 2 * layout.pipeline:
        assert everything.memory.total <= nothing.memory.total + 1e-9


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b"])
def test_a_stage_of_one_layer_needs_the_same_with_and_without_full_recompute(name: str) -> None:
    """Its backward pass holds all activations and the same gradients, kept or computed again."""
    shape = replace(model(name), layers=1, seq_len=32_768)
    kept, again = (
        candidate(shape, Layout(backend="megatron", recompute=recompute), ASSUMED).memory
        for recompute in ("none", "full")
    )
    inputs = again.activations
    assert again.total == pytest.approx(kept.total + inputs, rel=0.01)


@given(splits())
@settings(max_examples=200, deadline=None)
def test_a_faster_network_never_takes_longer(split: Split) -> None:
    shape, layout, assumed = split
    one = candidate(shape, layout, assumed)
    faster = replace(one.cluster, network=2 * one.cluster.network)
    assert replace(one, cluster=faster).time.total <= one.time.total + 1e-9


@pytest.mark.parametrize("network", [0.1, 1.25, 12.5])
def test_a_faster_gpu_never_takes_longer(network: float) -> None:
    """Computation that hides what stages send does not hide gradients, too."""
    gpu = hardware().gpu("mi250x")
    layout = Layout(
        backend="megatron", tensor=4, pipeline=2, virtual_pipeline=2, data=8, micro_batch=4,
        grad_accumulation=8, sharding="optimizer", recompute="full", sequence_parallel=True,
    )  # fmt: skip
    cluster = GpuCluster(gpu, 64, 8, network)
    one = Candidate(model("nemotron-4-15b"), layout, cluster, of_family(gpu.family), ASSUMED)
    faster = replace(gpu, flops={name: 1.3 * speed for name, speed in gpu.flops.items()})
    assert replace(one, cluster=replace(cluster, gpu=faster)).time.total < one.time.total


@pytest.mark.parametrize(("hosts", "sends"), [(2, 1), (4, 2)])
def test_a_pipeline_is_not_faster_than_its_hosts_can_send(hosts: int, sends: int) -> None:
    """A host between two others sends an activation and a gradient for each micro-batch."""
    shape = model("llama-3-70b")
    layout = Layout(backend="megatron", tensor=8, pipeline=hosts, grad_accumulation=256)
    slow = GpuCluster(hardware().gpu("h100-80gb"), 8 * hosts, 8, network=0.125)
    found = step_time(shape, layout, slow, of_family("hopper"), ASSUMED)
    least = 256 * sends * 2 * shape.seq_len * shape.hidden / 0.125e9
    assert least < found.total < 2 * least


@given(splits())
@settings(max_examples=200, deadline=None)
def test_each_kind_of_sharding_needs_no_more_memory_than_the_previous_one(
    split: Split,
) -> None:
    shape, layout, assumed = split
    needs = [
        candidate(shape, replace(layout, sharding=sharding), assumed).memory
        for sharding in ("none", "optimizer", "gradients")
    ]
    states = [each.parameters + each.gradients + each.optimizer for each in needs]
    assert states == sorted(states, reverse=True)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_on_one_stage(name: str) -> None:
    shape = model(name)
    for stages in range(1, shape.layers + 1):
        counts = stage_layers(shape, Layout(backend="megatron", pipeline=stages))
        assert len(counts) == stages and sum(counts) == shape.layers and min(counts) >= 1
        if shape.layers % stages == 0 and not shape.pattern:
            assert len(set(counts)) == 1


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pipeline", [1, 2, 4])
def test_stages_hold_all_parameters_together(name: str, pipeline: int) -> None:
    shape = model(name)
    layout = Layout(backend="megatron", pipeline=pipeline)
    held = sum(
        sum(parameters_of_stage(shape, layout, layers, stage))
        for stage, layers in enumerate(stage_layers(shape, layout))
    )
    # A tied matrix is on the first and the last stage; the last norm is too small to matter.
    copies = shape.head_parameters if shape.tied and pipeline > 1 else 0
    assert held == pytest.approx(shape.parameters + copies, rel=1e-4)


@pytest.mark.parametrize(
    "name", ["deepseek-v3", "kimi-k2", "deepseek-v3.2", "nemotron-h-47b", "granite-4.0-h-small"]
)
@pytest.mark.parametrize("pipeline", [4, 16, 32])
def test_the_memory_is_that_of_the_fullest_stage(name: str, pipeline: int) -> None:
    """Of 61 layers on 32 stages, the third one is the first without dense layers: with twice the
    experts of the second."""
    shape = model(name)
    layout = Layout(backend="megatron", pipeline=pipeline, grad_accumulation=64)
    every = [stage_memory(shape, layout, ASSUMED, stage).total for stage in range(pipeline)]
    assert memory(shape, layout, ASSUMED).total == max(every)


def test_activations_of_the_paper() -> None:
    """RAR (arXiv 2205.05198): s·b·h(34 + 5·a·s/h) for GELU and dropout, and its variants."""
    shape = replace(model("gpt-3-175b"), dropout=True)
    h, s, a = shape.hidden, shape.seq_len, shape.heads
    square = 5 * a * s / h
    old = Assumptions(flash_attention=False)
    assert layer_activations(shape, Layout(backend="megatron"), old) == pytest.approx(
        h * (34 + square)
    )
    assert layer_activations(shape, Layout(backend="megatron", tensor=8), old) == pytest.approx(
        h * (10 + 24 / 8 + square / 8)
    )
    split = Layout(backend="megatron", tensor=8, sequence_parallel=True)
    assert layer_activations(shape, split, old) == pytest.approx(h / 8 * (34 + square))
    assert layer_activations(shape, replace(split, recompute="selective"), old) == pytest.approx(
        34 * h / 8
    )
    assert layer_activations(shape, Layout(backend="megatron"), ASSUMED) == pytest.approx(34 * h)
    assert layer_activations(
        shape, Layout(backend="megatron", recompute="full"), ASSUMED
    ) == pytest.approx(2 * h)


def test_states_of_the_papers() -> None:
    """Megatron-LM's ``dist_optimizer.md`` and ZeRO (arXiv 1910.02054), bytes a parameter."""
    shape = model("llama-3-70b")

    def states(
        sharding: Sharding,
        precision: Precision = "bf16",
        fp32_gradients: bool = True,
        **habits: float,
    ) -> float:
        layout = Layout(backend="megatron", data=64, sharding=sharding, grad_accumulation=2)
        assumed = Assumptions(
            precision, fp32_gradients=fp32_gradients, habits=MemoryHabits(**habits)
        )
        used = memory(shape, layout, assumed)
        total = used.parameters + used.gradients + used.optimizer
        return total * 2**30 / shape.parameters

    assert states("none") == pytest.approx(18, rel=1e-4)
    assert states("optimizer") == pytest.approx(6 + 12 / 64, rel=1e-4)
    assert states("gradients") == pytest.approx(2 + 16 / 64, rel=1e-4)
    assert states("gradients", "bf16", False) == pytest.approx(2 + 14 / 64, rel=1e-4)
    assert states("full") == pytest.approx(16 / 64, rel=1e-4)
    assert states("none", "fp16", False) == pytest.approx(16, rel=1e-4)
    assert states("optimizer", "fp16", False) == pytest.approx(4 + 12 / 64, rel=1e-4)
    assert states("none", "fp32") == pytest.approx(16, rel=1e-4)
    # DeepSpeed in fp16 and bf16, and InternEvo.
    assert states("none", "fp16", False, step_copies=2) == pytest.approx(22, rel=1e-4)
    assert states("optimizer", both_gradients=True) == pytest.approx(8 + 12 / 64, rel=1e-4)
    kept = states("optimizer", "bf16", False, step_copies=10)
    assert kept == pytest.approx(4 + 26 / 64, rel=1e-4)
    # Megatron-Core's precision-aware optimizer, Adafactor without and with sharding.
    aware = states("none", "bf16", False, moment_bytes=2, master_bytes=2)
    assert aware == pytest.approx(10, rel=1e-4)
    assert states("none", moment_bytes=0) == pytest.approx(10, rel=1e-4)
    assert states("full", moment_bytes=0) == pytest.approx(8 / 64, rel=1e-4)


def test_narrow_moments_are_copied_for_the_step() -> None:
    """Qwen2.5-32B over 4 GH200s with Adam's moments in fp8 and no master weights ran out of 94.5
    GiB, although its states take 44; with 48 of the 64 layers it ran (a user of Megatron-LM)."""
    shape = replace(model("qwen2.5-32b"), vocab=50688, seq_len=4096)
    layout = Layout(
        backend="megatron", tensor=4, sharding="optimizer", recompute="full",
        grad_accumulation=256, sequence_parallel=True,
    )  # fmt: skip
    habits = MemoryHabits(moment_bytes=1, master_bytes=0)
    assumed = Assumptions(fp32_gradients=False, habits=habits)
    assert memory(shape, layout, assumed).total > 94.5
    fewer = memory(replace(shape, layers=48), layout, assumed)
    assert fewer.total < 0.96 * 94.5
    states = fewer.parameters + fewer.gradients + fewer.optimizer
    assert fewer.temporary == pytest.approx(states * 8 / 6)


def test_fp8_keeps_quantized_matrices_beside_those_of_16_bits() -> None:
    """Llama 3 8B with tensor 2 on 8 H100s took 71 GiB in bf16 and 74 in fp8 (FlagPerf). Blackwell
    needs no transposes. With fp8 parameters, Llama 3.1 405B took 52.5 GiB (MLPerf)."""
    shape = replace(model("llama-3-8b"), tied=True)
    layout = Layout(
        backend="megatron", tensor=2, data=4, sharding="optimizer", grad_accumulation=128,
        sequence_parallel=True,
    )  # fmt: skip
    h100, b200 = hardware().gpu("h100-80gb"), hardware().gpu("b200")
    needs = {
        (kind.name, precision): memory(
            shape, layout, Assumptions.usual(precision, kind, "megatron")
        )
        for kind in (h100, b200)
        for precision in ("bf16", "fp8")
    }
    matrices = (shape.parameters - shape.vocab * shape.hidden) / 2 / 2**30
    for kind, added in ((h100, 2), (b200, 1)):
        wide, narrow = (needs[kind.name, precision] for precision in ("bf16", "fp8"))
        assert narrow.parameters - wide.parameters == pytest.approx(added * matrices)
    assert needs["h100-80gb", "fp8"].total > needs["h100-80gb", "bf16"].total
    large = replace(model("llama-3.1-405b"), vocab=32000)
    split = Layout(
        backend="megatron", tensor=8, pipeline=8, virtual_pipeline=8, context=2, data=16,
        sharding="optimizer", grad_accumulation=72, sequence_parallel=True,
    )  # fmt: skip
    found = memory(large, split, Assumptions("fp8", fp32_gradients=False))
    assert found.allocated == pytest.approx(52.5, rel=0.09)
    less = memory(large, split, Assumptions("fp8", fp32_gradients=False, quantized=-1))
    assert less.parameters == pytest.approx(found.parameters / 2, rel=0.03)


def test_fp16_gradients_are_cast_when_the_activations_are_gone() -> None:
    """GPT of 4B parameters on 8 stages: 22.23 GiB with 4,096 tokens (VocabularyParallelism). The
    step alone has the 20 bytes of ``dist_optimizer.md``."""
    shape = Shape(32, 3072, 24, 24, 12288, 32000, 4096, 128, gated=False)
    layout = Layout(
        backend="megatron", pipeline=8, sharding="optimizer", grad_accumulation=128
    )  # fmt: skip
    assumed = Assumptions("fp16", fp32_gradients=False)
    found = memory(shape, layout, assumed)
    assert found.allocated + found.fragmentation == pytest.approx(22.23, rel=0.06)
    short = memory(replace(shape, seq_len=64), replace(layout, pipeline=1), assumed)
    assert short.allocated * 2**30 == pytest.approx(20 * shape.parameters, rel=0.01)
    away = memory(replace(shape, seq_len=64), replace(layout, pipeline=1, offload=True), assumed)
    assert away.allocated * 2**30 < 5 * shape.parameters


def test_copies_of_sharded_states_are_a_phase_of_the_step() -> None:
    """The step needs 14 bytes a parameter beside the 16 of the states, when no activation lives."""
    shape = replace(model("llama-3-8b"), seq_len=8)
    layout = Layout(backend="torchtitan", data=2, sharding="full", recompute="full")
    used = memory(shape, layout, Assumptions(habits=MemoryHabits(step_copies=14)))
    assert used.allocated * 2**30 / shape.parameters == pytest.approx(30 / 2, rel=1e-3)


def test_torchtitans_adam_needs_no_copies() -> None:
    """Its ``optimizer.implementation`` is ``fused``: 8 bytes a parameter, and nothing else."""
    shape = replace(model("llama-3-8b"), seq_len=8)
    assumed = Assumptions.usual("bf16", hardware().gpu("h100"), "torchtitan", narrow_states=True)
    used = memory(shape, Layout(backend="torchtitan"), assumed)
    assert used.allocated * 2**30 / shape.parameters == pytest.approx(8, rel=1e-2)


def test_adam_without_foreach_has_temporaries_of_one_layer() -> None:
    shape = replace(model("llama-3-8b"), seq_len=8, vocab=1024)
    layout = Layout(backend="torchtitan", data=2, sharding="full", recompute="full")
    habits = MemoryHabits(foreach=False)
    # Without the temporaries, the step is not the highest phase any more.
    every, one = (
        memory(shape, layout, Assumptions(habits=each)) for each in (MemoryHabits(), habits)
    )
    assert every.temporary * 2**30 == pytest.approx(4 * shape.parameters / 2, rel=1e-3)
    assert one.temporary * 2**30 < 3 * 4 * shape.layer_parameters()
    assert one.allocated < every.allocated


@pytest.mark.parametrize(("tensor", "pipeline", "measured"), [(8, 4, 62), (4, 8, 74)])
def test_megatron_lm_before_megatron_core_keeps_copied_keys_and_the_gate(
    tensor: int, pipeline: int, measured: float
) -> None:
    """Llama 2 70B with FlagScale on 32 H800s (FlagPerf), in GiB of the driver."""
    layout = Layout(
        backend="megatron", tensor=tensor, pipeline=pipeline, sharding="optimizer",
        grad_accumulation=44, sequence_parallel=True,
    )  # fmt: skip
    shape = replace(model("llama-2-70b"), seq_len=4096)
    old = Assumptions(habits=MemoryHabits(fused_gate=False, repeats_keys=True))
    more = layer_activations(shape, layout, old) - layer_activations(shape, layout, ASSUMED)
    assert more == 2 * (28672 + 2 * (64 - 8) * 128) / tensor
    repeats = replace(old, habits=MemoryHabits(repeats_keys=True))
    torch = Layout(backend="torchtitan", sharding="full", recompute="selective")
    assert layer_activations(shape, torch, repeats) == layer_activations(shape, torch, ASSUMED)
    assert memory(shape, layout, old).total == pytest.approx(measured, rel=0.14)


def test_pytorch_keeps_what_tensor_ranks_have_gathered() -> None:
    """Megatron-LM keeps a rank's part of the inputs of a layer's two first products."""
    shape = model("llama-2-7b")
    layout = Layout(backend="megatron", tensor=8, sequence_parallel=True)
    fused = layer_activations(shape, layout, Assumptions())
    unfused = layer_activations(shape, layout, Assumptions(habits=MemoryHabits(unfused=True)))
    swiglu = 2 * shape.ffn_hidden / 8
    assert unfused - fused == pytest.approx(4 * shape.hidden * 7 / 8 + swiglu)


def test_transformer_engine_keeps_the_inputs_of_products_in_8_bits() -> None:
    """Of four products, the input of the one after attention is also attention's output."""
    shape = model("llama-2-7b")
    layout = Layout(backend="megatron")
    wide, narrow = (layer_activations(shape, layout, Assumptions(one)) for one in ("bf16", "fp8"))
    assert wide - narrow == 2 * shape.hidden - shape.hidden + shape.ffn_hidden
    torch = replace(layout, backend="torchtitan")
    assert layer_activations(shape, torch, Assumptions("fp8")) == layer_activations(
        shape, torch, Assumptions("bf16")
    )


def test_selective_recompute_of_megatron_drops_outputs_of_cheap_modules() -> None:
    """DeepSeek-V3: norms, MLA's up projections (128 heads of 192, 192 and 128), the activation."""
    shape = model("deepseek-v3")
    layouts = {
        recompute: Layout(backend="megatron", recompute=recompute)
        for recompute in ("none", "selective", "full")
    }
    kept = {name: layer_activations(shape, one, ASSUMED) for name, one in layouts.items()}
    dropped = 4 * 7168 + 2 * 128 * (192 + 192 + 128) + 2 * 8 * 2048
    assert kept["none"] - kept["selective"] == pytest.approx(dropped)
    times = {name: candidate(shape, one).time.recompute for name, one in layouts.items()}
    assert 0 == times["none"] < times["selective"] < times["full"] / 5
    dense = model("llama-3-70b")
    assert layer_activations(dense, layouts["selective"], ASSUMED) == pytest.approx(
        layer_activations(dense, layouts["none"], ASSUMED)
    )
    # Megatron-Core's ``moe_act`` is of experts only: the first layers keep their activation.
    first = replace(shape, experts=0, experts_per_token=0, shared_experts=0, pattern=())
    assert layer_activations(first, layouts["none"], ASSUMED) - layer_activations(
        first, layouts["selective"], ASSUMED
    ) == pytest.approx(4 * 7168 + 2 * 128 * (192 + 192 + 128))
    every = replace(ASSUMED, habits=MemoryHabits(recomputes_activation=True))
    dropped = 4 * dense.hidden + 2 * dense.ffn_hidden
    assert layer_activations(dense, layouts["selective"], every) == pytest.approx(
        layer_activations(dense, layouts["none"], every) - dropped
    )
    wider = replace(dense, ffn_hidden=2 * dense.ffn_hidden)
    both = [candidate(one, layouts["selective"], every) for one in (dense, wider)]
    gapless = [replace(one, efficiency=replace(one.efficiency, gap=0.0)) for one in both]
    again = [one.time.recompute for one in gapless]
    # Four passes over the hidden size, and three over the MLP's inner one.
    assert again[1] / again[0] == pytest.approx((4 * 8192 + 6 * 28672) / (4 * 8192 + 3 * 28672))


def test_tensor_ranks_of_paddlepaddle_copy_the_input_of_each_product() -> None:
    """LLaMA 7B with tensor 2 took 58.7 GiB of 80 (FlagPerf), 9 more than without the copies."""
    habits = MemoryHabits(unfused=True, copies_inputs=True)
    for name, products in (("llama-7b", 5), ("gpt-3-175b", 2)):
        shape = model(name)
        for tensor in (1, 2):
            layout = Layout(backend="megatron", tensor=tensor)
            copying, plain = (
                layer_activations(shape, layout, Assumptions(habits=one))
                for one in (habits, MemoryHabits(unfused=True))
            )
            assert copying - plain == (tensor - 1) * 2 * products * shape.hidden


def test_deepspeed_keeps_the_output_of_a_stage() -> None:
    shape = model("llama-2-7b")
    layout = Layout(backend="megatron", pipeline=4, grad_accumulation=8, recompute="full")
    habits = MemoryHabits(keeps_outputs=True)
    plain = memory(shape, layout, Assumptions()).activations
    kept = memory(shape, layout, Assumptions(habits=habits)).activations
    layers = shape.layers / 4
    assert kept / plain == pytest.approx((layers + 1) / layers)


def test_gathered_logits_are_whole_on_every_rank() -> None:
    shape = model("llama-2-7b")
    layout = Layout(backend="megatron", tensor=4, pipeline=2, grad_accumulation=8)
    habits = MemoryHabits(unfused=True)
    split = stage_memory(shape, layout, Assumptions(habits=habits), 1)
    assumed = Assumptions(habits=replace(habits, gathers_logits=True))
    whole = stage_memory(shape, layout, assumed, 1)
    # In 32 bits, three copies; in 16, those of two micro-batches.
    assert whole.logits / split.logits == pytest.approx(4 * (12 + 4) / 12)
    cached = 8 * shape.seq_len * shape.vocab / 2**30
    ratio = split.fragmentation / split.allocated
    assert whole.fragmentation == pytest.approx(ratio * whole.allocated + cached)
    # Only the last stage has logits.
    first = stage_memory(shape, layout, assumed, 0)
    assert first == stage_memory(shape, layout, Assumptions(habits=habits), 0)


def test_stages_of_equally_many_modules() -> None:
    shape = model("llama-2-7b")
    layout = Layout(backend="megatron", pipeline=4)
    # 32 layers, the embedding, the last norm and the output layer.
    assert stage_layers(shape, layout, "inner") == (8, 9, 9, 6)
    assert sum(stage_layers(shape, replace(layout, pipeline=16), "inner")) == 32
    assert sum(stage_layers(shape, replace(layout, pipeline=32), "inner")) == 32


def test_a_recomputed_layer_also_holds_gradients_of_its_largest_activations() -> None:
    shape = model("gpt-3-175b")
    for split in (False, True):
        layout = Layout(
            backend="megatron", tensor=8, pipeline=8, recompute="full", sequence_parallel=split
        )
        for flash in (False, True):
            assumed = Assumptions(flash_attention=flash)
            kept = layer_activations(shape, layout, assumed, "none")
            # The score matrix's and the softmax's, or that of the MLP's inner width.
            widest = shape.ffn_hidden if flash else 2 * shape.heads * shape.seq_len
            stream = 2 * shape.hidden / (8 if split else 1)
            expected = shape.seq_len * (kept + 2 * (widest / 8 + stream)) / 2**30
            found = memory(shape, layout, assumed)
            # A weight's gradient needs more than that of short rows.
            weight = 6 * shape.hidden * shape.ffn_hidden / 8 / 2**30
            assert found.temporary == pytest.approx(max(expected, weight))


def test_a_layer_that_recomputes_its_scores_holds_them_in_its_backward_pass() -> None:
    """With gradients of the matrix and of the softmax, beside what it has kept."""
    shape = replace(model("gpt-3-175b"), seq_len=16384)
    layout = Layout(backend="megatron", tensor=8, pipeline=8, recompute="selective")
    plain, flash = Assumptions(flash_attention=False), Assumptions()
    # The scores, the softmax and the mask of its dropout: 5 bytes (RAR).
    matrix, stream = shape.heads * shape.seq_len**2 / 8, shape.seq_len * shape.hidden
    found = memory(shape, layout, plain)
    assert found.temporary == pytest.approx((5 * matrix + 2 * (2 * matrix + 2 * stream)) / 2**30)
    assert found.activations == memory(shape, layout, flash).activations
    assert memory(shape, replace(layout, recompute="full"), plain).total < found.total


def test_software_that_fills_the_first_or_the_last_stage() -> None:
    """10 layers on 4 stages are 3, 3, 3 and 1, since the output layer is as much work as 2.4."""
    shape = replace(model("llama-3-8b"), layers=10)
    layout = Layout(backend="megatron", pipeline=4, grad_accumulation=8)

    def layers(fullest: Literal["", "first", "last"], stage: int) -> float:
        assumed = Assumptions(habits=MemoryHabits(fullest=fullest))
        held = stage_memory(shape, layout, assumed, stage).parameters * 2**30 / 2
        ends = shape.embedding_parameters if stage in (0, 3) else 0
        return (held - ends) / shape.layer_parameters()

    assert [layers("", stage) for stage in (0, 1, 3)] == pytest.approx([3, 3, 1])
    # A quarter of 12.4 is 3.1, and the first stage has more.
    assert [layers("first", stage) for stage in (0, 1, 3)] == pytest.approx([4, 3, 1])
    assert [layers("last", stage) for stage in (0, 1, 3)] == pytest.approx([3, 3, 3])


def test_flat_copies_leave_gaps_in_the_allocator() -> None:
    layout = Layout(backend="megatron", tensor=8, data=8, sharding="optimizer")
    plain, copying = (
        memory(model("llama-3-70b"), layout, Assumptions(habits=MemoryHabits(step_copies=copies)))
        for copies in (0, 2)
    )
    assert plain.fragmentation == pytest.approx(FRAGMENTATION * plain.allocated)
    assert copying.fragmentation == pytest.approx(FRAGMENTATION_BY_TORCH * copying.allocated)


def test_tensors_that_a_compiler_places_leave_no_gaps() -> None:
    layout = Layout(backend="torchtitan", data=8, sharding="full")
    placed = Assumptions(habits=MemoryHabits(placed=True))
    assert memory(model("llama-3-8b"), layout, placed).fragmentation == 0


def test_each_communicator_has_its_own_buffers() -> None:
    """Megatron-LM also has one for all ranks, and one for the ranks that share a model. It has
    three for experts, and one for their replicas."""
    layout = Layout(backend="megatron", tensor=2, pipeline=2, data=2)
    experts = Layout(backend="megatron", data=4, expert=4)
    shards = Layout(backend="torchtitan", data=8, sharding="full")
    hybrid = replace(shards, data=16, sharding="hybrid", shard=8)
    alone = Layout(backend="megatron")
    shape = model("llama-3-8b")
    layouts = (layout, experts, replace(experts, data=8), shards, hybrid, alone)
    used = [memory(shape, one, ASSUMED).communication / COMMUNICATOR for one in layouts]
    assert used == pytest.approx([5, 5, 6, 1, 2, 0])
    tpus = Assumptions.usual("bf16", hardware().gpu("tpu-v5p"), "megatron")
    assert memory(shape, layout, tpus).communication == 0


@pytest.mark.parametrize(
    ("split", "tensors"),
    [
        ({"sequence_parallel": True}, 4 * 16),
        ({}, 2 * 16),
        ({"sequence_parallel": True, "virtual_pipeline": 4}, 4 * 4),
        ({"sequence_parallel": True, "pipeline": 1}, 4 * 32),
        ({"tensor": 1}, 0),
    ],
)
def test_collectives_may_hold_tensors_that_the_host_has_freed(
    split: dict[str, Any], tensors: int
) -> None:
    shape = replace(model("llama-3-8b"), seq_len=8192)
    few = {"tensor": 2, "pipeline": 2, "grad_accumulation": 8}
    layout = Layout(backend="megatron", **{**few, **split})
    now = memory(shape, layout, Assumptions())
    before = memory(shape, layout, Assumptions(habits=MemoryHabits(records_streams=True)))
    assert now.cached == 0
    assert before.cached == tensors * 2 * 8192 * 4096 / 2**30
    # The allocator waits for them if memory is short.
    assert before.total == now.total


def test_the_step_casts_gradients_of_fp16_when_activations_are_gone() -> None:
    shape = replace(model("llama-3-8b"), seq_len=64)
    layout = Layout(backend="megatron", data=8, sharding="optimizer", recompute="full")
    used = memory(shape, layout, Assumptions("fp16", fp32_gradients=False))
    assert used.temporary * 2**30 == pytest.approx(4 * shape.parameters / 8, rel=1e-3)
    assert used.activations + used.logits == 0


@pytest.mark.parametrize(("gpus", "joined"), [(64, 64), (72, 72), (256, 64), (288, 72), (6, 4)])
def test_a_job_uses_equal_parts_of_racks(gpus: int, joined: int) -> None:
    assert GpuCluster(hardware().gpu("gb200"), gpus, 4, 200.0).joined == joined


def test_racks_send_through_the_nics_of_all_their_hosts() -> None:
    """128 GB200s in two racks: a ring of one rank in each host has one host's 200 GB/s, and a ring
    through every second GPU of a rack shares its 3,200 GB/s with one other, so NVLink limits it."""
    chosen = hardware().gpu("gb200")
    efficiency = of_family(chosen.family)
    racks, host = GpuCluster(chosen, 128, 4, 200.0), GpuCluster(chosen, 4, 4, 200.0)
    far = Group(racks, efficiency, 2, 64).bandwidth
    assert far == pytest.approx(200e9 / 4 * efficiency.network, rel=1e-3)
    near = Group(host, efficiency, 4, 1).bandwidth
    assert Group(racks, efficiency, 64, 2).bandwidth == pytest.approx(near)
    # A slower network between racks limits all of a rack's hosts together.
    slow = replace(racks, rack_hosts=16, between_racks=10.0)
    limited = Group(slow, efficiency, 64, 2).bandwidth
    assert limited == pytest.approx(160e9 / 2 * efficiency.network, rel=1e-2)


def test_late_gathers_of_the_backward_pass_are_exposed() -> None:
    """8 ranks gather 8 billion parameters of 2 bytes in 16 micro-batches, once more backward."""
    chosen = hardware().gpu("h100-80gb")
    cluster, efficiency = GpuCluster(chosen, 8, 8, 400.0), of_family(chosen.family)
    shape = model("llama-3-8b")
    layout = Layout(backend="torchtitan", data=8, sharding="full", grad_accumulation=16)
    plain, late = (
        step_time(shape, layout, cluster, efficiency, Assumptions(gathers_late=late)).data
        for late in (False, True)
    )
    seconds = 16 * 2 * shape.parameters * 7 / 8 / (450e9 * efficiency.link)
    assert late - plain == pytest.approx((1 - efficiency.exposed_data) * seconds, rel=0.1)


def test_a_host_receives_a_token_once() -> None:
    """With 8 copies, 8 hosts of 8: 7 · (1 - (7/8)⁸) hosts, where 7 hosts would be all copies."""
    chosen = hardware().gpu("h100-80gb")
    group = Group(GpuCluster(chosen, 64, 8, 400.0), of_family(chosen.family), 64, 1)
    one, eight = group.exchange(1e9, 1), group.exchange(1e9, 8)
    assert eight / one == pytest.approx(8 * (1 - (7 / 8) ** 8), rel=1e-3)


def test_a_pipeline_with_zero_2_reduces_once_a_step() -> None:
    shape = model("llama-3-70b")
    layout = Layout(backend="megatron", tensor=8, data=8, sharding="gradients")
    steps = [replace(layout, pipeline=p, grad_accumulation=a) for p in (1, 4) for a in (8, 64)]
    traffic = [candidate(shape, step).time.data for step in steps]
    assert traffic[1] > 6 * traffic[0]
    assert traffic[3] <= traffic[2]
    whole = replace(steps[2], sharding="optimizer")
    assert candidate(shape, steps[2]).memory.gradients == candidate(shape, whole).memory.gradients


def test_each_micro_batch_adds_its_gradients_in_memory() -> None:
    """Megatron-LM reads and writes 4 bytes of each parameter. Two micro-batches of one sequence do
    it twice; otherwise only their smaller products cost more than those of one of two."""
    shape, chosen = model("llama-3-8b"), hardware().gpu("a100-80gb")
    usual = replace(of_family(chosen.family), gemm_half=0.0, gap=0.0)
    cluster = GpuCluster(chosen, 8, 8, 200.0)

    def compute(micro: int, assumed: Assumptions) -> float:
        layout = Layout(
            backend="megatron", tensor=8, micro_batch=micro, grad_accumulation=2 // micro
        )
        return Candidate(shape, layout, cluster, usual, assumed).time.compute

    parameters = (shape.parameters - shape.embedding_parameters) / 8
    once = 8 * parameters / (chosen.bandwidth * 1e9 * usual.stream)
    more = compute(1, ASSUMED) - compute(2, ASSUMED)
    assert more == pytest.approx(once, rel=0.01)
    # PyTorch's kernels write 2 bytes, read them, and read and write the sum.
    unfused = replace(ASSUMED, fuses_gradients=False)
    assert compute(1, unfused) - compute(2, unfused) == pytest.approx(1.5 * more)


def test_copies_of_tokens_are_sorted_by_expert_and_added() -> None:
    """Each copy is written and read once more, as is the token itself."""
    shape, chosen = model("qwen3-30b-a3b"), hardware().gpu("a100-80gb")
    one = replace(shape, experts_per_token=1, ffn_hidden=8 * shape.ffn_hidden)
    usual = of_family(chosen.family)
    cluster = GpuCluster(chosen, 8, 8, 200.0)
    layout = Layout(backend="megatron", expert=8, data=8)
    fewer, more = (
        Kernels(usual, cluster, each, layout, ASSUMED).stream_forward for each in (one, shape)
    )
    size = 2 * (7 * 2) * shape.hidden * shape.seq_len
    seconds = size / (chosen.bandwidth * 1e9 * usual.stream)
    assert more - fewer == pytest.approx(seconds)


def test_software_without_overlap_shows_all_traffic() -> None:
    shape = model("llama-3-8b")
    layout = Layout(backend="megatron", data=8, grad_accumulation=8, sharding="optimizer")
    hidden = candidate(shape, layout).time.data
    shown = candidate(shape, layout, replace(ASSUMED, overlaps_reduction=False)).time.data
    share = of_family("ampere").exposed_data
    assert hidden == pytest.approx(share * shown)


@pytest.mark.parametrize(("name", "slower"), [("a100-80gb", False), ("h100-80gb", True)])
def test_attention_of_pytorch_is_slower_on_newer_gpus(name: str, slower: bool) -> None:
    shape, chosen = model("llama-3-8b"), hardware().gpu(name)
    cluster = GpuCluster(chosen, 8, 8, 400.0)

    def compute(backend: BackendName) -> float:
        layout = Layout(backend=backend, data=8)
        return Candidate(shape, layout, cluster, of_family(chosen.family), ASSUMED).time.compute

    assert (compute("torchtitan") > 1.05 * compute("megatron")) is slower


def test_heads_of_odd_sizes_are_slow_without_flash_attention() -> None:
    """As in BLOOM's search: 128 heads of 13,824 took 1.4 times as long as 96 heads."""
    shape = replace(model("gpt-3-175b"), hidden=13824, heads=96, kv_heads=96, head_size=144)
    odd = replace(shape, heads=128, kv_heads=128, head_size=108)
    layout = Layout(backend="megatron", tensor=4, pipeline=12, data=8, recompute="full")
    plain, flash = Assumptions(flash_attention=False), Assumptions()

    def ratio(assumed: Assumptions) -> float:
        return (
            candidate(odd, layout, assumed).time.total
            / candidate(shape, layout, assumed).time.total
        )

    assert ratio(flash) < 1.05
    assert 1.2 < ratio(plain) < 1.6


def test_the_bubble_of_the_paper() -> None:
    """(p − 1)/m of the work, over v when interleaved (arXiv 2104.04473, section 2.2)."""
    shape = replace(model("gpt-3-175b"), vocab=1)
    for pieces in (1, 2, 3):
        layout = Layout(backend="megatron",
            tensor=8, pipeline=8, virtual_pipeline=pieces, grad_accumulation=64,
            sequence_parallel=True,
        )  # fmt: skip
        time = candidate(shape, layout).time
        work = time.compute + time.recompute + time.tensor
        assert time.bubble / work == pytest.approx(7 / 64 / pieces, rel=0.01)


def test_the_dense_layers_of_a_mixture_are_on_its_first_stage() -> None:
    shape, layout = model("deepseek-v3"), Layout(backend="megatron", pipeline=8)
    counts = stage_layers(shape, layout)
    experts = [
        parameters_of_stage(shape, layout, layers, stage)[1] / layers
        for stage, layers in enumerate(counts)
    ]
    every = shape.experts * shape.expert_parameters
    assert experts[0] == pytest.approx(every * (counts[0] - 3) / counts[0])
    assert experts[1:] == [pytest.approx(every)] * 7


def test_parallel_blocks_have_half_of_the_norms_and_of_the_tensor_traffic() -> None:
    serial = replace(model("gpt-3-175b"), dropout=False)
    parallel = replace(serial, parallel=True)
    for recompute in ("none", "full"):
        layout = Layout(backend="megatron", tensor=8, recompute=recompute)
        times = [candidate(shape, layout).time for shape in (serial, parallel)]
        assert times[1].tensor == pytest.approx(times[0].tensor / 2)
        assert times[1].compute < times[0].compute
    layout = Layout(backend="megatron")
    # Of 8 bytes, the second norm's input and output; of no layer's matrices.
    saved = [layer_activations(shape, layout, ASSUMED) for shape in (serial, parallel)]
    assert saved[0] - saved[1] == pytest.approx(4 * serial.hidden)
    assert parallel.parameters == serial.parameters


def test_attention_without_a_mask_takes_twice_as_long() -> None:
    shape = model("bert-large")
    both = [
        candidate(replace(shape, causal=causal), Layout()).time.compute for causal in (False, True)
    ]
    assert both[0] > both[1]
    assert candidate(shape, Layout()).speed.mfu_causal == candidate(shape, Layout()).speed.mfu


def test_older_gpus_have_no_flash_attention() -> None:
    v100, a100 = hardware().gpu("v100"), hardware().gpu("a100")
    assert not Assumptions.usual("fp16", v100, "megatron").flash_attention
    # PyTorch has another kernel there that keeps no score matrix.
    assert Assumptions.usual("fp16", v100, "runtime").flash_attention
    assert Assumptions.usual("fp16", a100, "megatron").flash_attention


@pytest.mark.parametrize("sharding", ["none", "gradients", "full"])
def test_the_runtime_sums_gradients_of_fp16_in_32_bits(sharding: Sharding) -> None:
    """As its ``reduce`` says: so a step in fp16 takes as long as in bf16. Megatron-LM's sums have
    16 bits."""
    a100, shape = hardware().gpu("a100"), model("llama-3-8b")
    layout = Layout(data=16, sharding=sharding, grad_accumulation=4)
    bf16, fp16 = (
        candidate(shape, layout, Assumptions.usual(precision, a100, "runtime")).time
        for precision in ("bf16", "fp16")
    )
    assert bf16 == fp16
    assert not Assumptions.usual("fp16", a100, "megatron").fp32_gradients


def test_hardware_utilization_counts_what_flash_attention_computes() -> None:
    shape = replace(model("llama-3-8b"), seq_len=131_072)
    for recompute, repeated in (("none", 1.0), ("full", 4 / 3)):
        speed = candidate(shape, Layout(backend="megatron", recompute=recompute)).speed
        assert speed.hfu / speed.mfu == pytest.approx(repeated, rel=0.02)
        assert speed.hfu_causal / speed.mfu_causal == pytest.approx(repeated, rel=0.02)


@pytest.mark.parametrize("name", ["gpt2", "nemotron-h-8b"])
@pytest.mark.parametrize("backend", ["megatron", "torchtitan"])
@pytest.mark.parametrize("flash", [False, True])
def test_recompute_never_adds_memory_to_a_stage(
    name: str, backend: BackendName, flash: bool
) -> None:
    """Of a stage with one layer, which has nothing that recompute saves in other layers."""
    shape = model(name)
    assumed = Assumptions(flash_attention=flash)
    for stage in range(shape.layers):
        kept, again = (
            stage_memory(
                shape,
                Layout(
                    tensor=2, pipeline=shape.layers, micro_batch=8, grad_accumulation=2,
                    recompute=recompute, backend=backend,
                ),
                assumed,
                stage,
            ).total
            for recompute in ("none", "selective")
        )  # fmt: skip
        assert again <= kept * 1.001, stage
