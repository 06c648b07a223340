"""Memory of other software, most of which fine-tunes: what it keeps beside what a plan needs.

The measured figures are peaks of PyTorch's allocator: of LitGPT, from its resource tables and its
table of configurations; of fms-acceleration, from ``scripts/benchmarks/refs`` with Hugging Face's
trainer, LoRA of rank 16 on attention's matrices with dropout, and 4,096 tokens; of KempnerForge,
from ``benchmarks/mfu_scaling``: Llama 3 with all states in bf16, and 4,096 tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtrain.parallelism.assumptions import Assumptions, MemoryHabits
from dtrain.parallelism.cluster.efficiency import of_family
from dtrain.parallelism.cluster.hardware import GpuCluster
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.cost.memory import Memory, memory
from dtrain.parallelism.model.adapters import Lora
from dtrain.parallelism.model.models import model
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import Layout

ONE = Layout(backend="torchtitan", recompute="full")
LITGPT = MemoryHabits(whole_gradients=True, flat_adapters=True, frozen_inputs=2)
HUGGING_FACE = MemoryHabits(whole_gradients=True, keeps_inputs=True, fixed_segments=True)
FSDP2 = MemoryHabits(whole_gradients=True, wide_sums=True, gathers_logits=True, fused_adam=True)
RANK_8 = Lora(8, "attention")
QKV = Lora(8, "attention", dropout=1)
NF4: dict[str, Any] = {"base_bits": 4, "double_quantized": False}
RANK_16 = Lora(16, "attention", dropout=4)


def tuned(name: str, length: int, lora: Lora | None = None) -> Shape:
    return replace(model(name), seq_len=length, lora=lora)


def needs(shape: Shape, layout: Layout, habits: MemoryHabits, *, kernels: bool = False) -> Memory:
    """Memory if all parameters have 16 bits, and losses are those of PyTorch, or in place."""
    assumed = Assumptions(narrow_states=True, loss_bytes=8 if kernels else None, habits=habits)
    return memory(shape, layout, replace(assumed, separate_kernels=not kernels))


def test_a_flat_parameter_of_adapters_and_frozen_weights_has_a_whole_gradient() -> None:
    """LitGPT, Llama 2 13B with LoRA on 4 GPUs, sums micro-batches: 35.57 GB."""
    layout = replace(ONE, data=4, sharding="full", grad_accumulation=4)
    shape = tuned("llama-2-13b", 1304, RANK_8)
    found = needs(shape, layout, LITGPT)
    assert found.allocated == pytest.approx(35.57e9 / 2**30, rel=0.02)
    apart = needs(shape, layout, replace(LITGPT, flat_adapters=False))
    assert apart.gradients < 0.01 * found.gradients
    once = needs(shape, replace(layout, grad_accumulation=1), LITGPT)
    assert once.gradients == pytest.approx(found.gradients / 4, rel=0.05)


@pytest.mark.parametrize(
    ("name", "lora", "length", "batch", "kept", "gb"),
    [
        # From the table of configurations: on queries and values, and on all matrices.
        ("llama-2-7b", QKV, 512, 2, 0, 19.77),
        ("llama-2-7b", replace(QKV, **NF4), 512, 2, 2, 13.68),
        ("phi-2", Lora(8, "all", dropout=2), 512, 4, 0, 13.98),
        ("phi-2", Lora(8, "all", dropout=2, **NF4), 512, 4, 2, 14.27),
        # From the resource tables, whose first micro-batch is the longest.
        ("llama-2-7b", QKV, 1304, 1, 0, 21.30),
        ("llama-2-7b", replace(QKV, **NF4), 1304, 1, 1, 14.14),
    ],
)
def test_adapters_copy_their_inputs_and_products_of_four_bits_keep_them(
    name: str, lora: Lora, length: int, batch: int, kept: int, gb: float
) -> None:
    """LitGPT on one GPU, with dropout of the adapters' inputs, and bitsandbytes 0.41 or 0.42."""
    layout = replace(ONE, recompute="none", micro_batch=batch)
    shape = tuned(name, length, lora)
    found = needs(shape, layout, replace(LITGPT, frozen_inputs=kept))
    assert found.allocated == pytest.approx(gb * 1e9 / 2**30, rel=0.065)
    dry = needs(replace(shape, lora=replace(lora, dropout=0)), layout, LITGPT)
    assert dry.activations != found.activations


def test_keys_may_be_repeated_for_each_query_head() -> None:
    """Hugging Face and PEFT, Llama 3.2 3B has 8 key heads of 24: as many bytes as for 16 more."""
    layout = replace(ONE, recompute="none")
    shape = tuned("llama-3.2-3b", 512, RANK_8)
    few, many = (
        needs(shape, layout, replace(HUGGING_FACE, repeats_keys=repeats)).activations
        for repeats in (False, True)
    )
    assert (many - few) * 2**30 == pytest.approx(28 * 512 * 2 * 2 * 16 * 128)


@pytest.mark.parametrize(("gpus", "gib"), [(1, 30.169), (2, 31.767), (4, 28.344)])
def test_frozen_weights_under_fsdp1_keep_inputs_and_their_gradients(gpus: int, gib: float) -> None:
    """Mistral 7B with LoRA, 8 sequences on each GPU, fused kernels for norms and the loss."""
    layout = replace(ONE, micro_batch=8, data=gpus, sharding="none" if gpus == 1 else "full")
    shape = tuned("mistral-7b", 4096, RANK_16)
    found = needs(shape, layout, HUGGING_FACE, kernels=True)
    assert found.allocated == pytest.approx(gib, rel=0.05)


@pytest.mark.parametrize(
    ("name", "lora", "batch", "gib"),
    [
        ("llama-2-70b", replace(RANK_16, base_bits=4), 2, 43.220),
        ("llama-3-8b", RANK_16, 8, 49.341),
    ],
)
def test_kept_inputs_and_gradients_grow_from_layer_to_layer(
    name: str, lora: Lora, batch: int, gib: float
) -> None:
    """On 2 GPUs: 80 layers, which leave more than a loss needs; and 32 with a large vocabulary,
    whose peak is the loss, before the backward pass."""
    layout = replace(ONE, micro_batch=batch, data=2, sharding="full")
    found = needs(tuned(name, 4096, lora), layout, HUGGING_FACE, kernels=True)
    assert found.allocated == pytest.approx(gib, rel=0.03)


@pytest.mark.parametrize(("wide", "gib"), [(False, 15.249), (True, 19.250)])
def test_preparation_for_four_bits_widens_the_rest(wide: bool, gib: float) -> None:
    """Mistral 7B with QLoRA on one GPU, 4 sequences; with PEFT's preparation and without."""
    shape = tuned("mistral-7b", 4096, replace(RANK_16, base_bits=4))
    found = needs(shape, replace(ONE, micro_batch=4), replace(HUGGING_FACE, wide_rest=wide))
    assert found.allocated == pytest.approx(gib, rel=0.09)
    assert found.allocated <= gib


@pytest.mark.parametrize(
    ("model_name", "batch", "gib"),
    # Published: Halo, one B300, all states in 16 bits, without recomputation.
    [("qwen3-4b", 4, 102.0), ("qwen3-8b", 4, 140.0), ("qwen3-8b", 8, 235.0)],
)
def test_kernels_of_liger_compute_the_gate_again(model_name: str, batch: int, gib: float) -> None:
    layout = replace(ONE, recompute="none", micro_batch=batch)
    habits = replace(HUGGING_FACE, fused_gate=True)
    assert needs(tuned(model_name, 4096), layout, habits, kernels=True).allocated == pytest.approx(
        gib, rel=0.02
    )


@pytest.mark.parametrize(("gpus", "gib", "lora_gib"), [(8, 38.67, 32.57), (64, 30.43, 29.81)])
def test_a_loop_may_hold_what_a_model_of_hugging_face_returns(
    gpus: int, gib: float, lora_gib: float
) -> None:
    """ATorch's example: Llama 2 7B under autocast, which gathers parameters of 32 bits."""
    layout = replace(ONE, data=gpus, sharding="full", micro_batch=4)
    plain = replace(HUGGING_FACE, wide_rest=True)
    found = [
        [
            memory(tuned("llama-2-7b", 4096, lora), layout, Assumptions(habits=habits)).allocated
            for lora in (None, RANK_16)
        ]
        for habits in (plain, replace(plain, holds_outputs=True))
    ]
    assert found[1] == pytest.approx([gib, lora_gib], rel=0.15)
    # Keys and values of 32 layers, and 4 bytes for each logit.
    assert found[1][0] - found[0][0] == pytest.approx(8 + 1.95, rel=0.01)


def test_autocast_widens_the_residual_stream() -> None:
    """Enoki, 3.4 billion parameters, on 4 H100s: 45.4 GiB with 4 sequences of 2,048 tokens."""
    shape = Shape(33, 2816, 44, 44, 11264, 50304, 2048, 64, gated=False)
    layout = replace(ONE, data=4, sharding="full", micro_batch=4, recompute="none")
    assumed = [
        Assumptions(fp32_gradients=False, habits=MemoryHabits(wide_rest=wide))
        for wide in (False, True)
    ]
    found = [memory(shape, layout, one).allocated for one in assumed]
    assert found == pytest.approx([45.4 * 0.83, 45.4 * 0.9], rel=0.01)


def test_scores_of_plain_attention_are_kept_in_32_and_16_bits() -> None:
    """OpenLLaMA 7B with LoRA, without flash attention, on an A100 of 40 GB: 2 sequences of 512
    tokens took 28.2 GiB (vertex-ai-samples), and of 1,024 did not fit."""
    layout = replace(ONE, recompute="none", micro_batch=2)
    assumed = Assumptions("fp16", narrow_states=True, separate_kernels=True, habits=HUGGING_FACE)
    plain = replace(assumed, flash_attention=False)
    shape = tuned("llama-2-7b", 1024, Lora(16, "all"))
    flash, kept = (memory(shape, layout, how).activations for how in (assumed, plain))
    assert kept - flash == pytest.approx(6 * 32 * 32 * 2 * 1024**2 / 2**30)
    assert memory(shape, layout, plain).total > hardware().gpu("a100-40gb").memory
    short = memory(replace(shape, seq_len=512), layout, plain)
    assert short.total == pytest.approx(28.2, rel=0.17)


def test_cached_blocks_are_freed_if_memory_is_short() -> None:
    """Mistral 7B with LoRA on one A100: nvidia-smi shows 42.22 GiB for 8 sequences."""
    shape, layout = tuned("mistral-7b", 4096, RANK_16), replace(ONE, micro_batch=8)
    assumed = Assumptions(narrow_states=True, separate_kernels=True, habits=HUGGING_FACE)
    found = memory(shape, layout, assumed)
    assert found.total + found.cached == pytest.approx(42.22, rel=0.06)
    chosen = hardware().gpu("a100-40gb")
    cluster = GpuCluster(chosen, 1, 1, 200.0)
    candidate = Candidate(shape, layout, cluster, of_family(chosen.family), assumed)
    assert found.total < candidate.limit < found.total + found.cached
    assert candidate.fits


def test_batches_of_different_lengths_leave_blocks_that_do_not_fit() -> None:
    """Qwen 7B with LoRA, examples of up to 2,048 tokens: 27.74 GiB reserved (ms-swift)."""
    shape = Shape(32, 4096, 32, 32, 11008, 151936, 2048, 128, lora=RANK_8)
    assumed = Assumptions(narrow_states=True, separate_kernels=True, habits=HUGGING_FACE)
    equal = memory(shape, ONE, assumed)
    varied = memory(shape, ONE, replace(assumed, varied_lengths=True))
    reserved = varied.allocated + varied.fragmentation + varied.cached
    assert reserved == pytest.approx(27.74, rel=0.05)
    assert varied.allocated == equal.allocated


def test_streams_of_fsdp_do_not_share_blocks() -> None:
    """Mistral 7B on 4 GPUs, 4 sequences each, a fused loss: 33.74 GiB allocated, 46.58 in
    nvidia-smi."""
    layout = replace(ONE, data=4, sharding="full", micro_batch=4)
    assumed = Assumptions(fused_loss=True, habits=HUGGING_FACE)
    found = memory(tuned("mistral-7b", 4096), layout, assumed)
    assert found.allocated == pytest.approx(33.74, rel=0.01)
    assert found.total + found.cached == pytest.approx(46.58, rel=0.05)


def test_a_fused_adam_needs_no_temporaries() -> None:
    """torchtune, Llama 3.2 3B, all states in bf16, 2 × 4,096 tokens: 24.9 GiB."""
    layout = replace(ONE, micro_batch=2)
    assumed = Assumptions(narrow_states=True, fused_loss=True, habits=MemoryHabits(fused_adam=True))
    found = memory(tuned("llama-3.2-3b", 4096), layout, assumed)
    assert found.allocated == pytest.approx(24.9, rel=0.03)
    several = memory(tuned("llama-3.2-3b", 4096), layout, replace(assumed, habits=MemoryHabits()))
    assert several.allocated > 1.15 * found.allocated


def test_deepspeed_has_buffers_for_gradients_on_one_gpu_too() -> None:
    """They add to the memory that is reserved, also where nothing is reduced."""
    shape = replace(tuned("qwen3-1.7b", 256, RANK_16), lora=replace(RANK_16, base_bits=4))
    plain, with_buffers = (
        needs(shape, ONE, replace(HUGGING_FACE, buckets=gib)) for gib in (0.0, 1.0)
    )
    assert with_buffers.total - plain.total == 1.0
    assert with_buffers.allocated == plain.allocated


def test_fsdp2_sums_whole_gradients_in_32_bits() -> None:
    """KempnerForge, Llama 3 8B on 4 GPUs, 2 × 4 sequences: 61.1 GiB."""
    layout = replace(ONE, data=4, sharding="full", micro_batch=4, grad_accumulation=2)
    assumed = Assumptions(narrow_states=True, loss_bytes=8, habits=FSDP2)
    found = memory(tuned("llama-3-8b", 4096), layout, assumed)
    assert found.allocated == pytest.approx(61.1, rel=0.05)
    narrow = replace(assumed, habits=replace(FSDP2, wide_sums=False))
    whole = memory(tuned("llama-3-8b", 4096), layout, narrow)
    assert whole.gradients == pytest.approx(found.gradients / 2)
    # FSDP1 casts gradients only for their reduction, also those of 32-bit parameters.
    mixed = replace(narrow, narrow_states=False)
    assert memory(tuned("llama-3-8b", 4096), layout, mixed).gradients == whole.gradients


def test_tensor_ranks_of_hugging_face_have_all_logits() -> None:
    """TRL, Qwen3 4B with 32,768 tokens and tensor 4, did not fit in 80 GB: a quarter of the logits
    takes 14 GiB, all of them 56."""
    layout = replace(ONE, tensor=4, data=8, sharding="full", sequence_parallel=True)
    found = needs(tuned("qwen3-4b", 32768), layout, replace(HUGGING_FACE, gathers_logits=True))
    assert found.logits == pytest.approx(12 * 32768 * 151936 / 2**30, rel=0.01)
    # The blocks of the loss are among the cached ones.
    assert found.fragmentation < 0.04 * found.allocated


def test_kept_logits_split_blocks_of_one_chunk() -> None:
    """ms-swift, Qwen3 1.7B with 65,536 tokens and Liger's loss: 23.6 GiB reserved on each of 8
    GPUs, although all logits in 16 bits would take 18.5."""
    layout = replace(ONE, data=8, sharding="gradients", recompute="full")
    assumed = Assumptions(loss_chunks=75, habits=HUGGING_FACE)
    found = memory(tuned("qwen3-1.7b", 65536), layout, assumed)
    assert found.cached < 0.5 * found.allocated


def test_tensor_ranks_may_have_all_logits() -> None:
    """KempnerForge, Llama 3 70B on 32 GPUs, tensor 4, 4 × 2 sequences: 93.2 GiB."""
    layout = Layout(
        backend="torchtitan", recompute="full", tensor=4, data=8, sharding="full",
        micro_batch=2, grad_accumulation=4, sequence_parallel=True,
    )  # fmt: skip
    assumed = Assumptions(narrow_states=True, loss_bytes=8, habits=FSDP2)
    found = memory(tuned("llama-3-70b", 4096), layout, assumed)
    assert found.allocated == pytest.approx(93.2, rel=0.05)
    split = replace(assumed, habits=replace(FSDP2, gathers_logits=False))
    assert found.allocated > 1.04 * memory(tuned("llama-3-70b", 4096), layout, split).allocated
