"""Each part of the planned memory, for layouts that use every term of the formulas.

Other tests compare totals with measurements, within a few percent, and most of their layouts split
nothing but the data. A term that is small there may be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cost.memory import memory
from dtrain.parallelism.model.models import model
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import Layout

RECORD = Path(__file__).with_name("memory_parts.json")
SMALL: dict[str, Any] = {"layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 4, "head_size": 64}
SMALL |= {"ffn_hidden": 2816, "vocab": 32000, "seq_len": 1024}
SHAPES = {
    "dense": Shape(**SMALL),
    "plain": Shape(**{**SMALL, "kv_heads": 16, "gated": False, "tied": True, "dropout": True}),
    "experts": Shape(**SMALL, experts=8, experts_per_token=2),
    "wide vocabulary": Shape(**{**SMALL, "layers": 2, "vocab": 256000}),
    "deepseek-v3": model("deepseek-v3"),
}
LAYOUTS = {
    "one": Layout(),
    "data": Layout(data=4, micro_batch=2),
    "accumulated": Layout(data=4, grad_accumulation=4),
    "zero-1": Layout(data=4, sharding="optimizer", grad_accumulation=2),
    "zero-2": Layout(data=4, sharding="gradients", grad_accumulation=2),
    "fsdp": Layout(data=4, sharding="full"),
    "fsdp, accumulated": Layout(data=4, sharding="full", grad_accumulation=4, micro_batch=2),
    "hybrid": Layout(data=8, sharding="hybrid", shard=4),
    "full recompute": Layout(data=4, sharding="full", recompute="full", micro_batch=4),
    "selective recompute": Layout(data=4, recompute="selective", micro_batch=4),
    "selective, fsdp": Layout(data=4, sharding="full", recompute="selective"),
    "full recompute, unsharded": Layout(data=4, recompute="full", micro_batch=16),
    "full recompute, sequence": Layout(
        tensor=2, data=2, sequence_parallel=True, sharding="full", recompute="full", micro_batch=8
    ),
    "selective recompute, tensor": Layout(tensor=2, recompute="selective", micro_batch=8),
    "long": Layout(data=8, sharding="full", micro_batch=16),
    "tensor": Layout(tensor=4, data=2),
    "sequence": Layout(tensor=4, sequence_parallel=True, sharding="full", data=2),
    "context": Layout(context=4, data=2, sharding="full"),
    "1f1b": Layout(pipeline=4, grad_accumulation=8),
    "gpipe": Layout(pipeline=2, grad_accumulation=8, schedule="gpipe"),
    "interleaved": Layout(pipeline=2, virtual_pipeline=2, grad_accumulation=8),
    "zb-v": Layout(pipeline=2, virtual_pipeline=2, grad_accumulation=8, schedule="zb-v"),
    "3d": Layout(
        tensor=2, pipeline=2, data=4, sequence_parallel=True, sharding="optimizer",
        grad_accumulation=4, recompute="selective",
    ),
    "3d, fsdp": Layout(tensor=2, pipeline=2, data=4, sharding="full", grad_accumulation=4),
    "offload": Layout(data=4, sharding="optimizer", offload=True),
    "offloaded activations": Layout(data=4, sharding="full", offload_activations=True),
    "reduced in bf16": Layout(data=4, sharding="full", reduce="bf16"),
    "compiled": Layout(data=4, sharding="full", compile=True),
}  # fmt: skip
ASSUMED = {
    "": Assumptions(),
    "fp32": Assumptions("fp32"),
    "fp16": Assumptions("fp16", fp32_gradients=False),
    "unfused": Assumptions(flash_attention=False, fused_loss=True, fp32_gradients=False),
}


def cases() -> Iterator[tuple[str, Shape, Layout, Assumptions]]:
    for kind, shape in SHAPES.items():
        for name, layout in LAYOUTS.items():
            for backend in ("runtime", "megatron", "torchtitan"):
                split = replace(layout, backend=backend)
                if shape.experts and layout.copies > 1:
                    split = replace(split, expert=2)
                if kind == "wide vocabulary" and layout.pipeline > 2:
                    continue
                yield f"{kind}, {name}, {backend}", shape, split, ASSUMED[""]
    for assumed in ("fp32", "fp16", "unfused"):
        for name in ("one", "accumulated", "zero-2", "fsdp", "selective, fsdp", "3d"):
            for backend in ("runtime", "megatron"):
                split = replace(LAYOUTS[name], backend=backend)
                yield f"{assumed}, {name}, {backend}", SHAPES["plain"], split, ASSUMED[assumed]


def test_each_part(update_golden: bool) -> None:
    """GiB, in the order of `Memory`'s fields."""
    found = {name: list(astuple(memory(*case))) for name, *case in cases()}
    if update_golden:
        lines = (
            f"{json.dumps(name)}: {json.dumps([float(f'{part:.5g}') for part in parts])}"
            for name, parts in found.items()
        )
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    recorded = json.loads(RECORD.read_text())
    assert found.keys() == recorded.keys()
    for name, parts in found.items():
        assert parts == pytest.approx(recorded[name], rel=1e-4), name


@pytest.mark.parametrize("backend", ["runtime", "megatron", "torchtitan"])
def test_ranks_of_a_sequence_divide_what_it_needs(backend: Any) -> None:
    whole = memory(SHAPES["dense"], Layout(backend=backend, data=2), Assumptions())
    half = memory(SHAPES["dense"], Layout(backend=backend, context=2), Assumptions())
    assert half.logits == pytest.approx(whole.logits / 2, rel=0.01)
    assert half.activations == pytest.approx(whole.activations / 2, rel=0.01)


@pytest.mark.parametrize("backend", ["runtime", "megatron", "torchtitan"])
def test_norms_of_queries_and_keys_keep_their_inputs(backend: Any) -> None:
    """16 heads and 4 key heads of 64 elements, in 16 bits, in 8 layers."""
    layout = Layout(backend=backend, micro_batch=16)
    plain, normed = (
        memory(replace(SHAPES["dense"], qk_norm=norms), layout, Assumptions())
        for norms in (False, True)
    )
    more = (normed.activations - plain.activations) * 2**30
    assert more == pytest.approx(8 * 16 * 1024 * 2 * (16 + 4) * 64)


@pytest.mark.parametrize("backend", ["runtime", "megatron", "torchtitan"])
def test_tensor_ranks_divide_the_states(backend: Any) -> None:
    whole = memory(SHAPES["dense"], Layout(backend=backend, data=2), Assumptions())
    half = memory(SHAPES["dense"], Layout(backend=backend, tensor=2), Assumptions())
    for part in ("parameters", "optimizer"):
        assert getattr(half, part) == pytest.approx(getattr(whole, part) / 2, rel=0.01), part
