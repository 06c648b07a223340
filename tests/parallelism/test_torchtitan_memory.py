"""Memory of torchtitan: what its streams, its split or compiled loss and its pipelines keep.

The measured figures are peaks of the allocator's reserved bytes, from torchtitan's ``benchmarks``:
``llama3_h100_202412_torchtitan.md`` and ``llama3-8b_h200_202506_trainy-whitefiber.md``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtrain.parallelism.assumptions import Assumptions, MemoryHabits
from dtrain.parallelism.cost.memory import Memory, memory
from dtrain.parallelism.cost.stages import receive_buffers
from dtrain.parallelism.model.models import model
from dtrain.runtime.layout import Layout, Recompute

TITAN = Layout(backend="torchtitan", sharding="full", micro_batch=2, recompute="selective")
TENSOR = replace(
    TITAN, tensor=8, data=32, micro_batch=16, recompute="full", sequence_parallel=True
)  # fmt: skip
PIPELINE = replace(TENSOR, pipeline=8, data=8, micro_batch=4, grad_accumulation=8)


def reserved(found: Memory) -> float:
    return found.allocated + found.fragmentation + found.cached


def needs(name: str, layout: Layout, assumed: Assumptions) -> Memory:
    return memory(replace(model(name), seq_len=8192), layout, assumed)


def test_gathered_parameters_and_shards_of_gradients_have_streams_of_their_own() -> None:
    """Llama 3.1 8B: 82.4 GiB on 8 GPUs, 67.0 on 128. The loss copies its 16-bit logits, whose
    block is then too small for it."""
    few = needs("llama-3.1-8b", replace(TITAN, data=8), Assumptions())
    many = needs("llama-3.1-8b", replace(TITAN, data=128), Assumptions())
    assert reserved(few) == pytest.approx(82.4, rel=0.02)
    assert reserved(many) == pytest.approx(67.0, rel=0.02)
    shards = 4 * 8.03e9 * (1 / 8 - 1 / 128) / 2**30
    assert few.cached - many.cached == pytest.approx(shards, rel=0.01)
    assert needs("llama-3.1-8b", replace(TITAN, sharding="none"), Assumptions()).cached == 0


def test_a_compiler_keeps_no_output_that_the_backward_pass_does_not_read() -> None:
    """Llama 3.1 8B on 8 GPUs, compiled: 77.0 GiB. Eager layers keep their last product."""
    layout = replace(TITAN, data=8)
    eager = needs("llama-3.1-8b", layout, Assumptions())
    compiled = needs("llama-3.1-8b", replace(layout, compile=True), Assumptions())
    assert reserved(compiled) == pytest.approx(77.0, rel=0.02)
    kept = 2 * 4096 * 2 * 8192 * 32 / 2**30
    assert eager.activations - compiled.activations == pytest.approx(kept)


def test_a_compiled_loss_keeps_no_logits_of_32_bits() -> None:
    """Llama 3.1 8B on 32 H200s: 47.96 GiB."""
    layout = replace(TITAN, data=32, compile=True)
    found = needs("llama-3.1-8b", layout, Assumptions(loss_bytes=4))
    assert reserved(found) == pytest.approx(47.96, rel=0.06)


def test_a_loss_over_tensor_ranks_takes_more_temporaries() -> None:
    """Llama 3.1 70B on 256 GPUs, asynchronous tensor parallelism: 67.6 GiB."""
    found = needs("llama-3.1-70b", TENSOR, Assumptions())
    assert reserved(found) == pytest.approx(67.6, rel=0.08)
    logits = 16 * 8192 * 128256 / 8
    assert found.logits == pytest.approx(16 * logits / 2**30)


def test_a_compiled_loss_over_tensor_ranks_keeps_tensors_of_32_bits() -> None:
    """Qwen3 32B on 8 GB200s, compiled, full recomputation: 136.4 GiB."""
    layout = replace(TENSOR, tensor=2, data=4, micro_batch=32, compile=True)
    shape = replace(model("qwen3-32b"), seq_len=2048)
    assumed = Assumptions(loss_bytes=4, habits=MemoryHabits(fused_adam=True))
    found = memory(shape, layout, assumed)
    assert reserved(found) == pytest.approx(136.4, rel=0.06)
    assert found.logits == pytest.approx(10 * 32 * 2048 * 151936 / 2 / 2**30)


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_tensor_ranks_have_gradients_of_their_parts_of_a_matrix(tensor: int) -> None:
    """What does not grow with the tokens of a layer's backward pass is one matrix's gradient."""
    layout = replace(TENSOR, tensor=tensor, data=256 // tensor)
    once, twice = (
        needs("llama-3.1-70b", replace(layout, micro_batch=size), Assumptions(loss_chunks=1000))
        for size in (16, 32)
    )
    gradient = (2 * once.temporary - twice.temporary) * 2**30
    assert gradient == pytest.approx(2 * 8192 * 28672 / tensor)


def test_a_pipeline_keeps_receive_buffers() -> None:
    """Llama 3.1 405B on 512 GPUs, 8 micro-batches of 4 sequences: 82.5 GiB."""
    found = needs("llama-3.1-405b", PIPELINE, Assumptions())
    assert reserved(found) == pytest.approx(82.5, rel=0.09)
    counts = [receive_buffers(PIPELINE, stage) for stage in (0, 1, 7)]
    assert counts == [8, 16, 8]
    assert receive_buffers(replace(PIPELINE, virtual_pipeline=2), 1) == 32
    assert receive_buffers(TENSOR, 0) == 0


@pytest.mark.parametrize(
    ("recompute", "habits", "streams"),
    [
        ("full", MemoryHabits(), 1),
        ("full", MemoryHabits(recomputes_parts=True), 2),
        # A residual stream of 32 bits.
        ("full", MemoryHabits(recomputes_parts=True, wide_rest=True), 4),
        # Queries, keys, values and attention's output, and both inner tensors of the MLP.
        (
            "selective", MemoryHabits(recomputes_activation=True, fused_gate=True),
            2 + (2 * 4096 + 2 * 1024 + 2 * 14336) / 4096,
        ),
    ],
)  # fmt: skip
def test_software_can_choose_what_a_block_computes_again(
    recompute: Recompute, habits: MemoryHabits, streams: float
) -> None:
    """xLLM's ``TransformerBlockFunction`` saves the inputs of attention and of the MLP, and what
    its settings do not compute again; its loss has as many chunks as the vocabulary is larger than
    the hidden size (``fused_blocks/cross_entropy.py``)."""
    layout = replace(TITAN, data=128, micro_batch=4, recompute=recompute)
    parts = Assumptions(loss_chunks=32, habits=habits)
    found = needs("llama-3.1-8b", layout, parts)
    one = 2 * 4096 * 4 * 8192 * 32 / 2**30
    assert found.activations == pytest.approx(one * streams, rel=0.07)
    whole = needs("llama-3.1-8b", layout, replace(parts, loss_chunks=1))
    assert found.total < whole.total


def test_the_optimizers_step_has_no_activations() -> None:
    """Only the pipeline's receive buffers stay."""
    layout = Layout(pipeline=4, grad_accumulation=8, backend="torchtitan")
    shape = replace(model("llama-3-8b"), seq_len=512)
    found = memory(shape, layout, Assumptions())
    # Adam's temporaries of all tensors, which no backward pass has.
    assert found.temporary > 8
    received = 2 * shape.hidden * shape.seq_len * receive_buffers(layout, 0)
    assert found.activations * 2**30 == received
