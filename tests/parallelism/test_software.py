"""What the planner knows about the software of a run: kernels, overlap, and what it sends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtrain.parallelism.assumptions import (
    COMPILED_LOSS,
    FLASH_1,
    TRITON_ATTENTION,
    Assumptions,
    MemoryHabits,
)
from dtrain.parallelism.backends import MEGATRON_FSDP, PYTORCH_HOOKS, TRANSFORMER_ENGINE
from dtrain.parallelism.cluster.efficiency import KNOWN, OVERLAPPED, of_family, of_gpu
from dtrain.parallelism.cluster.hardware import GpuCluster
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.parallelism.cost.candidate import EXPERTS, Candidate
from dtrain.parallelism.cost.collectives import Group
from dtrain.parallelism.cost.data_parallel import HOST_MEMORY, PCIE
from dtrain.parallelism.cost.launches import launches
from dtrain.parallelism.cost.layer import Kernels
from dtrain.parallelism.cost.speed import speed
from dtrain.parallelism.cost.step_time import StepTime
from dtrain.parallelism.model.models import model
from dtrain.runtime.layout import BackendName, Layout, Recompute, Sharding

H100 = hardware().gpu("h100-80gb")


def candidate(name: str, layout: Layout, assumed: Assumptions, chosen: str = "") -> Candidate:
    device = hardware().gpu(chosen) if chosen else H100
    cluster = GpuCluster(device, layout.world_size, min(8, layout.world_size), 400.0)
    return Candidate(model(name), layout, cluster, of_family(device.family), assumed)


def test_a_norm_of_separate_kernels_passes_through_memory_18_times_instead_of_2() -> None:
    layout = Layout(backend="torchtitan", data=8, sharding="full")
    fused, separate = (
        candidate("llama-3-8b", layout, Assumptions(separate_kernels=each))
        for each in (False, True)
    )
    parts = [
        Kernels(one.efficiency, one.cluster, one.shape, one.layout, one.assumed)
        for one in (fused, separate)
    ]
    shape = fused.shape
    heads = (shape.heads + shape.kv_heads) * shape.head_size
    passes = 2 * (18 - 2) * shape.hidden + (10 - 2) * heads
    bandwidth = H100.bandwidth * 1e9 * fused.efficiency.stream
    slower = parts[1].stream_forward - parts[0].stream_forward
    assert slower == pytest.approx(2 * shape.seq_len * passes / bandwidth)
    # GPT's layer norm was one kernel from the start.
    gpt = [
        candidate("gpt-3-6.7b", layout, Assumptions(separate_kernels=each)).time.compute
        for each in (False, True)
    ]
    assert gpt[0] == gpt[1]


def test_scores_of_separate_kernels_pass_through_memory_6_more_times() -> None:
    fused, separate = (
        Kernels(one.efficiency, one.cluster, one.shape, one.layout, one.assumed)
        for one in (
            candidate(
                "gpt-3-6.7b", Layout(), Assumptions(flash_attention=False, separate_kernels=each)
            )
            for each in (False, True)
        )
    )
    scores = 2 * fused.shape.seq_len**2 * fused.shape.heads
    seconds = 6 * scores / (H100.bandwidth * 1e9 * fused.efficiency.stream)
    assert separate.attention_forward - fused.attention_forward == pytest.approx(seconds)


def test_tensor_traffic_hides_only_with_pieces_of_products() -> None:
    layout = Layout(backend="megatron", tensor=8, sequence_parallel=True)
    hidden, shown = (
        candidate("llama-3-70b", layout, Assumptions(hides_tensor=each)) for each in (True, False)
    )
    share = hidden.efficiency.exposed_tensor
    assert hidden.time.tensor == pytest.approx(share * shown.time.tensor)
    # On A100s, no published run hides it.
    older = [
        candidate("llama-3-70b", layout, Assumptions(hides_tensor=each), "a100-80gb").time.tensor
        for each in (True, False)
    ]
    assert older[0] == older[1]


def test_an_interleaved_pipeline_sends_while_it_computes() -> None:
    def exposed(gbps: float = 400.0, pieces: int = 5) -> float:
        """Exposed share of the sends between a pipeline's start and end."""
        layout = Layout(
            backend="megatron", tensor=8, pipeline=4, virtual_pipeline=pieces, grad_accumulation=16
        )
        cluster = GpuCluster(H100, 32, 8, gbps)
        one = replace(candidate("llama-3-70b", layout, Assumptions()), cluster=cluster)
        # Each of the 8 tensor ranks sends a part of 8,192 activations of 2 bytes for each token.
        size = 2 * 8192 * one.shape.seq_len / 8
        once = Group(cluster, one.efficiency, 4, 8).send(size)
        return (one.time.pipeline / 2 / once - 3) / 16 / pieces

    assert exposed() == pytest.approx(OVERLAPPED)
    # A send that takes longer than the computation of a piece cannot hide behind it.
    assert exposed(3.2) == pytest.approx(0.5)
    # All of it shows if the network is the bottleneck: each host sends twice for each piece.
    assert exposed(0.1) == pytest.approx(1.0, abs=0.02)
    # Without interleaving, the next stage waits.
    assert exposed(pieces=1) == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt-3-6.7b"])
def test_selective_recompute_of_torchtitan_repeats_half_of_the_products(name: str) -> None:
    """Its policy keeps the outputs of attention and of products 1, 3, 5 ... of a layer, so keys,
    attention's output and, in gated MLPs, the second product are repeated."""

    def recompute(seq_len: int) -> float:
        layout = Layout(
            backend="torchtitan", sharding="full", recompute="selective",
            micro_batch=32768 // seq_len,
        )  # fmt: skip
        shape = replace(model(name), seq_len=seq_len)
        one = replace(candidate(name, layout, Assumptions()), shape=shape)
        return Kernels(one.efficiency, one.cluster, shape, layout, one.assumed).recompute(moe=False)

    # Attention's time grows with the sequence; what is repeated does not.
    assert recompute(8192) == recompute(2048)
    shape, layout = model(name), Layout(backend="torchtitan")
    cheap = replace(of_family("hopper"), gemm_half=0.0, stream=1e6)
    kernels = Kernels(cheap, GpuCluster(H100, 8, 8, 400.0), shape, layout, Assumptions())
    h, keys = shape.hidden, shape.kv_heads * shape.head_size
    again = h * keys + h * h + (h * shape.ffn_hidden if shape.gated else 0)
    every = h * (2 * h + 2 * keys) + shape.matrices * h * shape.ffn_hidden
    selective = replace(kernels, layout=replace(layout, recompute="selective"))
    share = selective.recompute(moe=False) / kernels.weights_forward(moe=False)
    assert share == pytest.approx(again / every, rel=1e-3)
    # Other software with PyTorch's FSDP may repeat norms and activations alone.
    norms = MemoryHabits(recomputes_activation=True)
    kept = replace(selective, assumed=Assumptions(habits=norms))
    assert 0 < kept.recompute(moe=False) < 0.01 * selective.recompute(moe=False)
    rate = speed(shape, kept.layout, kept.cluster, kept.assumed, 1.0)
    assert rate.hfu == rate.mfu


@pytest.mark.parametrize(("name", "attends"), [("llama-3-8b", True), ("deepseek-v3", False)])
def test_selective_recompute_of_megatron_repeats_attention_or_modules(
    name: str, attends: bool
) -> None:
    """Flash attention runs again in the backward pass (``core_attn``), unless the modules of large
    models with experts are chosen in its place."""

    def recompute(speed: float) -> float:
        layout = Layout(backend="megatron", recompute="selective")
        one = candidate(name, layout, Assumptions())
        usual = replace(one.efficiency, attention=one.efficiency.attention * speed)
        return Kernels(usual, one.cluster, one.shape, layout, one.assumed).recompute(moe=False)

    assert (recompute(0.5) > recompute(1.0)) is attends


def test_no_traffic_overlaps_if_the_host_waits_for_each_kernel() -> None:
    layout = Layout(backend="megatron", data=8, grad_accumulation=4, sharding="optimizer")
    usual, blocking = (
        candidate("llama-3-8b", layout, Assumptions(blocking=each)).time for each in (False, True)
    )
    assert blocking.compute == usual.compute
    assert blocking.data > 2 * usual.data


def test_one_graph_of_a_step_never_waits_for_the_host() -> None:
    layout = Layout(backend="megatron", data=8, expert=8, sharding="optimizer")
    usual, graph = (
        candidate("mixtral-8x7b", layout, Assumptions(one_graph=each)).time
        for each in (False, True)
    )
    assert usual.host > 0 == graph.host
    assert graph.total == pytest.approx(usual.total - usual.host)


@pytest.mark.parametrize("network", [400.0, 1.0])
def test_traffic_slows_the_computation_beside_it(network: float) -> None:
    """So traffic that takes longer than the computation adds more than the difference."""
    layout = Layout(backend="megatron", data=16, sharding="full")
    both, traffic = (
        replace(
            candidate("llama-3-8b", layout, Assumptions(blocking=each)),
            cluster=GpuCluster(H100, 16, 8, network),
        ).time
        for each in (False, True)
    )
    assert (traffic.data > both.compute) is (network == 1)
    beside = min(traffic.data, both.compute)
    assert both.data == pytest.approx(traffic.data - (1 - OVERLAPPED) * beside)


def test_a_host_that_waits_for_each_kernel_adds_each_launch_to_the_step() -> None:
    def total(launch: float, *, blocking: bool) -> float:
        one = candidate("llama-3-8b", Layout(data=8), Assumptions(blocking=blocking))
        return replace(one, efficiency=replace(one.efficiency, launch=launch)).time.total

    first, second = (
        total(launch, blocking=True) - total(0.0, blocking=True) for launch in (10e-6, 20e-6)
    )
    assert second == pytest.approx(2 * first)
    assert first > 0
    # Otherwise the host starts kernels ahead of time.
    assert total(10e-6, blocking=False) == total(0.0, blocking=False)


def test_states_of_16_bits_are_14_bytes_of_each_parameter_for_adam() -> None:
    """It reads the parameter, its gradient and two moments, and writes all but the gradient. With a
    copy in 32 bits, these are 34 bytes on a GPU and 28 in the host's memory."""

    def optimizer(*, narrow: bool, offload: bool) -> float:
        layout = Layout(backend="megatron", offload=offload)
        assumed = Assumptions(narrow_states=narrow, fp32_gradients=False)
        return candidate("llama-3-8b", layout, assumed).time.optimizer

    wide, narrow = (optimizer(narrow=each, offload=False) for each in (False, True))
    assert narrow == pytest.approx(wide * 14 / 34)
    wide, narrow = (optimizer(narrow=each, offload=True) for each in (False, True))
    assert wide - narrow == pytest.approx(14 * model("llama-3-8b").parameters / HOST_MEMORY)


def test_offloaded_states_are_copied_as_often_as_they_are_gathered() -> None:
    """For each pass of a micro-batch; once in a pipeline that keeps what it gathers. The gradients
    return once in each of these layouts, which adds a copy."""

    def copies(layout: Layout, *, narrow: bool = False) -> float:
        def data(*, offload: bool) -> float:
            assumed = Assumptions(
                narrow_states=narrow,
                overlaps_reduction=False,
                habits=MemoryHabits(offloads="all"),
            )
            return candidate("llama-3-8b", replace(layout, offload=offload), assumed).time.data

        return (data(offload=True) - data(offload=False)) * PCIE * layout.data

    parameters = model("llama-3-8b").parameters
    layout = Layout(backend="torchtitan", data=8, sharding="full")
    assert copies(layout) == pytest.approx(3 * 4 * parameters)
    assert copies(layout, narrow=True) == pytest.approx(3 * 2 * parameters)
    longer = replace(layout, grad_accumulation=8)
    assert copies(longer) == pytest.approx((16 + 1) * 4 * parameters)
    largest = 16 * model("llama-3-8b").layer_parameters() + model("llama-3-8b").head_parameters
    stages = replace(longer, pipeline=2)
    assert copies(stages) == pytest.approx(2 * 4 * largest, rel=0.01)


def test_flash_attention_2_is_as_fast_on_a_b200_as_on_an_h100() -> None:
    """It has no instructions of either. arXiv 2307.08691 measures 335 TFLOP/s."""

    def attention(chosen: str, *, flash2: bool) -> float:
        one = candidate("llama-3-8b", Layout(), Assumptions(flash2=flash2), chosen)
        parts = Kernels(one.efficiency, one.cluster, one.shape, one.layout, one.assumed)
        return parts.attention_flop() / parts.attention_forward

    assert attention("b200", flash2=False) > 2 * attention("h100-80gb", flash2=False)
    assert attention("b200", flash2=True) < 1.5 * attention("h100-80gb", flash2=True)


@pytest.mark.parametrize("early", [FLASH_1, TRITON_ATTENTION])
def test_early_flash_attention_is_slower(early: float) -> None:
    def attention(chosen: str, share: float = 1.0) -> float:
        layout = Layout(backend="torchtitan")
        one = candidate("llama-3-8b", layout, Assumptions(early_attention=share), chosen)
        return Kernels(
            one.efficiency, one.cluster, one.shape, one.layout, one.assumed
        ).attention_forward

    share = attention("a100-80gb") / attention("a100-80gb", early)
    assert share == pytest.approx(early)
    # On H100s, PyTorch's own FlashAttention-2 is hardly faster.
    assert attention("h100-80gb", early) < 1.3 * attention("h100-80gb")


def test_some_software_has_an_older_flash_attention_than_its_backend() -> None:
    def attention(backend: BackendName, *, flash2: bool | None) -> float:
        layout = Layout(backend=backend, data=8, sharding="optimizer")
        one = candidate("llama-3-8b", layout, Assumptions(flash2=flash2))
        parts = Kernels(one.efficiency, one.cluster, one.shape, one.layout, one.assumed)
        return parts.attention_forward

    older, newer = (attention(each, flash2=None) for each in ("torchtitan", "megatron"))
    assert older > newer
    assert attention("megatron", flash2=True) == older
    assert attention("torchtitan", flash2=False) == newer


@pytest.mark.parametrize(
    ("chosen", "ratio"),
    # Products of a head of 64 take half as long as of 128, its exponentials as long. The products
    # of 128 take 2, 4 and 0.6 times as long as the exponentials.
    [("h100-80gb", 0.666), ("a100-80gb", 0.568), ("b200", 0.765)],
)
def test_small_heads_take_as_many_exponentials(chosen: str, ratio: float) -> None:
    wide = model("llama-3-8b")
    narrow = replace(wide, head_size=64)
    seconds = []
    for shape in (wide, narrow):
        one = candidate("llama-3-8b", Layout(backend="megatron"), Assumptions(), chosen)
        parts = Kernels(one.efficiency, one.cluster, shape, one.layout, one.assumed)
        seconds.append(parts.attention_forward)
    assert seconds[1] / seconds[0] == pytest.approx(ratio, abs=1e-3)


def test_a_sum_of_gradients_for_all_ranks_is_one_more_pass() -> None:
    def traffic(**assumed: bool) -> float:
        layout = Layout(backend="megatron", data=8, sharding="optimizer")
        known = Assumptions(fp32_gradients=False, overlaps_reduction=False, **assumed)
        return candidate("llama-3-8b", layout, known).time.data

    # A scatter and a gather of gradients and a gather of parameters, all in 16 bits.
    assert traffic(reduces_to_all=True) / traffic() == pytest.approx(3 / 2, rel=0.05)


@pytest.mark.parametrize("steps", [1, 8])
def test_parameters_that_are_gathered_after_the_step_are_not_hidden(steps: int) -> None:
    def time(**assumed: bool) -> StepTime:
        layout = Layout(backend="megatron", data=8, sharding="optimizer", grad_accumulation=steps)
        return candidate("llama-3-8b", layout, Assumptions(fp32_gradients=False, **assumed)).time

    every, hidden, after = time(overlaps_reduction=False), time(), time(gathers_after=True)
    # The gather of parameters is as long as the scatter of gradients, which a backward pass hides,
    # even if it is that of the last micro-batch alone.
    shown = (1 + OVERLAPPED) / 2
    assert hidden.data / every.data == pytest.approx(OVERLAPPED)
    assert after.data / every.data == pytest.approx(shown, rel=0.02)
    backward = every.compute * 2 / 3 / steps
    assert backward > every.data / 2


def test_idle_time_is_of_each_layer_and_micro_batch() -> None:
    layout = Layout(backend="megatron", pipeline=8, grad_accumulation=24)
    busy, idle = (
        candidate("llama-3-70b", layout, Assumptions(idle=seconds)).time for seconds in (0.0, 0.01)
    )
    # 80 layers in 8 stages; 24 micro-batches, and 7 to fill and drain the pipeline.
    assert idle.total - busy.total == pytest.approx(0.01 * 10 * (24 + 7))


def test_torchtitan_gathers_parameters_in_fp8() -> None:
    def traffic(backend: str, precision: str) -> float:
        layout = Layout(backend=backend, data=64, sharding="full")  # type: ignore[arg-type]
        assumed = Assumptions(precision, overlaps_reduction=False)  # type: ignore[arg-type]
        return candidate("llama-3-70b", layout, assumed).time.data

    # Two gathers of 2 bytes and a scatter of 4; the gathers shrink to 1 byte.
    assert traffic("torchtitan", "fp8") / traffic("torchtitan", "bf16") == pytest.approx(
        6 / 8, rel=0.1
    )
    assert traffic("megatron", "fp8") == traffic("megatron", "bf16")


@pytest.mark.parametrize(
    ("name", "interval"),
    [
        ("a100-pcie-40gb", tuple(KNOWN.values())),
        ("gb300", tuple(KNOWN.values())),
        # Of the architecture of A100s and H100s, but their speeds are not measured.
        ("rtx-3090", (0.6, 1.9)),
        ("h20", (0.6, 1.9)),
    ],
)
def test_the_interval_is_wide_for_gpus_that_are_not_measured(
    name: str, interval: tuple[float, float]
) -> None:
    efficiency = of_gpu(hardware().gpu(name))
    assert (efficiency.interval_low, efficiency.interval_high) == interval


def test_the_interval_is_wider_with_experts() -> None:
    layout = Layout(backend="megatron", data=8)
    dense, experts = (
        candidate(name, layout, Assumptions()) for name in ("llama-3-8b", "mixtral-8x7b")
    )
    assert dense.interval == pytest.approx([dense.time.total * end for end in KNOWN.values()])
    low, high = experts.interval
    assert low == pytest.approx(experts.time.total * KNOWN["interval_low"])
    assert high == pytest.approx(experts.time.total * KNOWN["interval_high"] * EXPERTS)
    unknown = replace(dense, efficiency=of_family("new"))
    assert unknown.interval[1] > unknown.time.total * KNOWN["interval_high"]


@pytest.mark.parametrize(("recompute", "again"), [("none", 0.0), ("full", 1.0)])
def test_kernels_follow_each_other_after_a_gap(recompute: Recompute, again: float) -> None:
    """24 kernels of a layer's forward pass. What the host does beside them leaves no gaps."""
    layout = Layout(backend="megatron", data=8, grad_accumulation=2, recompute=recompute)
    one = candidate("llama-3-8b", layout, Assumptions(module_work=50.0))
    without = replace(one, efficiency=replace(one.efficiency, gap=0.0))
    each = 2 * 32 * 24 * one.efficiency.gap
    assert one.time.compute - without.time.compute == pytest.approx(2.6 * each)
    assert one.time.recompute - without.time.recompute == pytest.approx(again * each)


def test_a_fused_loss_reads_fewer_bytes_unless_metrics_repeat_it() -> None:
    assumed = Assumptions()
    plain, fused, repeated, compiled = (
        candidate("gpt2", Layout(backend="megatron"), one)
        for one in (
            assumed,
            replace(assumed, fused_loss=True),
            replace(assumed, fused_loss=True, repeats_loss=True),
            replace(assumed, loss_bytes=COMPILED_LOSS),
        )
    )
    logits = plain.shape.vocab * plain.shape.seq_len
    bandwidth = plain.cluster.gpu.bandwidth * 1e9 * plain.efficiency.stream
    saved = plain.time.compute - fused.time.compute
    assert saved == pytest.approx(42 * logits / bandwidth)
    assert fused.time.compute < repeated.time.compute < plain.time.compute
    assert compiled.time.compute == fused.time.compute
    # The gradient takes the place of the logits.
    assert plain.memory.logits - fused.memory.logits == pytest.approx(4 * logits / 2**30)


def test_steps_do_not_become_shorter_with_more_hosts() -> None:
    device = hardware().gpu("b200")
    steps = []
    for hosts in (1, 2, 4, 8, 32, 128):
        layout = Layout(backend="megatron", data=8 * hosts, sharding="optimizer")
        cluster = GpuCluster(device, 8 * hosts, 8, 400.0)
        one = Candidate(model("llama-3-8b"), layout, cluster, of_gpu(device), Assumptions())
        steps.append(one.time.total)
    assert steps == sorted(steps)


@pytest.mark.parametrize("backend", ["megatron", "torchtitan"])
def test_a_loss_in_chunks_holds_the_logits_of_one(backend: BackendName) -> None:
    layout = Layout(backend=backend, recompute="full", micro_batch=16)
    whole, parts = (
        candidate("gpt2", layout, Assumptions(loss_chunks=chunks)).memory for chunks in (1, 8)
    )
    assert whole.logits > 0
    assert parts.allocated < whole.allocated
    assert parts.logits in (0.0, whole.logits / 8)


@pytest.mark.parametrize(
    ("name", "backend", "sharding", "added"),
    [
        ("llama-3-8b", "megatron", "none", TRANSFORMER_ENGINE),
        ("llama-3-8b", "megatron", "full", TRANSFORMER_ENGINE + MEGATRON_FSDP),
        ("qwen3-30b-a3b", "megatron", "none", 0.0),
        ("llama-3-8b", "torchtitan", "none", 0.0),
        ("llama-3-8b", "torchtitan", "full", PYTORCH_HOOKS),
        ("qwen3-30b-a3b", "torchtitan", "full", PYTORCH_HOOKS),
    ],
)
def test_modules_and_hooks_take_the_host_as_long_as_launches(
    name: str, backend: BackendName, sharding: Sharding, added: float
) -> None:
    layout = Layout(backend=backend, data=8, sharding=sharding)
    usual = Assumptions.usual("bf16", H100, backend)
    bare = replace(usual, module_work=0.0, sharding_work=0.0)
    work, without = (launches(model(name), layout, one) for one in (usual, bare))
    assert work - without == pytest.approx(2.6 * added)
