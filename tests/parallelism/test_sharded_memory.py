"""Planned memory under FSDP, compared with PyTorch's memory tracker for real modules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain.parallelism.assumptions import Assumptions, MemoryHabits
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.parallelism.cost.memory import memory
from dtrain.parallelism.model.models import model
from dtrain.parallelism.model.shape import Shape
from dtrain.planning.question import pose
from dtrain.planning.request import PlanRequest
from dtrain.runtime.layout import Layout, Sharding
from support.oracles import ask
from support.warm import TORCH

RECORD = json.loads(Path(__file__).with_name("oracle_cases.json").read_text())["entries"]
FRESH = {
    "name": "fresh", "layers": 5, "hidden": 1536, "heads": 12, "kv_heads": 4, "ffn_hidden": 4096,
    "vocab": 24000, "seq_len": 512, "data": 16, "micro_batch": 3, "recompute": "full",
    "tied": True,
}  # fmt: skip


def allocated(case: dict[str, Any]) -> float:
    """Bytes that the planner counts for the allocator."""
    gated = case.get("gated", True)
    shape = Shape(
        layers=case["layers"],
        hidden=case["hidden"],
        heads=case["heads"],
        kv_heads=case.get("kv_heads", case["heads"]),
        ffn_hidden=case["ffn_hidden"],
        vocab=case["vocab"],
        seq_len=case["seq_len"],
        head_size=case["hidden"] // case["heads"],
        gated=gated,
        tied=case.get("tied", False),
        learned_positions=not gated,
    )
    layout = Layout(
        backend="torchtitan",
        data=case["data"],
        sharding="full",
        micro_batch=case.get("micro_batch", 1),
        grad_accumulation=case.get("grad_accumulation", 1),
        recompute=case.get("recompute", "none"),
    )
    assumed = Assumptions(
        precision="fp32" if case.get("param_dtype") == "float32" else "bf16",
        fp32_gradients=case.get("reduce_dtype", "float32") == "float32",
        habits=MemoryHabits(keeps_gathered=not case.get("reshard_after_forward", True)),
    )
    return memory(shape, layout, assumed).allocated * 2**30


@pytest.mark.parametrize(
    ("pieces", "gib"),
    # Published: llama3_h100_202412_torchtitan.md, table 5, with torchtitan's default of as many
    # micro-batches as stages.
    [(1, 82.5), (2, 72.7)],
)
def test_a_pipeline_of_torchtitan_keeps_gathered_parameters(pieces: int, gib: float) -> None:
    layout = {
        "tensor": 8, "pipeline": 8, "data": 8, "sharding": "full", "micro_batch": 4,
        "virtual_pipeline": pieces, "recompute": "full",
    }  # fmt: skip
    request = PlanRequest(
        model="llama-3.1-405b", gpu="h100", gpus=512, seq_len=8192, global_batch=256,
        precision="fp8", backend="torchtitan", fixed=layout,
    )  # fmt: skip
    candidate = pose(request).answer().best
    assert candidate.memory.allocated == pytest.approx(gib, rel=0.25)
    more = replace(candidate, layout=replace(candidate.layout, micro_batch=1, grad_accumulation=32))
    assert more.time.data == pytest.approx(candidate.time.data, rel=0.1)


@pytest.mark.parametrize("entry", RECORD, ids=lambda entry: entry["case"]["name"])
def test_recorded_cases(entry: dict[str, Any]) -> None:
    assert allocated(entry["case"]) == pytest.approx(entry["answer"]["peak"], rel=0.03)


@pytest.mark.torch
def test_a_case_not_used_for_the_formulas() -> None:
    oracle = Path(__file__).with_name("fsdp_oracle.py")
    answer = ask(TORCH, oracle, json.dumps(FRESH))
    assert allocated(FRESH) == pytest.approx(answer["peak"], rel=0.05)


def test_states_of_16_bits_on_one_gpu() -> None:
    """Parameter, gradient, two moments and a copy in Adam's step: 10 bytes. A Qwen 7B took 73.4 GiB
    of PyTorch's reserved memory this way (ms-swift's benchmark, 512 tokens)."""
    shape = Shape(32, 4096, 32, 32, 11008, 151936, 512, 128)
    layout = Layout(backend="torchtitan", recompute="full", grad_accumulation=16)
    found = memory(shape, layout, Assumptions(narrow_states=True))
    assert found.allocated == pytest.approx(10 * shape.parameters / 2**30, rel=0.01)
    assert found.allocated + found.fragmentation == pytest.approx(73.4, rel=0.03)
    wide = memory(shape, layout, Assumptions())
    assert wide.allocated > 1.9 * found.allocated


def test_zero_1_keeps_whole_gradients_between_micro_batches() -> None:
    """Baichuan 2 13B took 77 GiB on each of 16 GPUs with DeepSpeed (FlagPerf): 26 for parameters,
    and as much for gradients."""
    shape = model("llama-2-7b")
    layout = Layout(backend="torchtitan", data=16, grad_accumulation=8, recompute="full")
    assumed = Assumptions(fp32_gradients=False, habits=MemoryHabits(fused_adam=True))
    kept = {
        sharding: memory(shape, replace(layout, sharding=sharding), assumed).gradients * 2**30
        for sharding in ("optimizer", "gradients")
    }
    assert kept["optimizer"] == pytest.approx(2 * shape.parameters, rel=1e-3)
    assert kept["gradients"] == pytest.approx(2 * shape.parameters / 16, rel=1e-3)
    wide = memory(shape, replace(layout, sharding="optimizer"), replace(assumed, precision="fp32"))
    assert wide.gradients * 2**30 == pytest.approx(4 * shape.parameters, rel=1e-3)


@pytest.mark.parametrize(
    ("sharding", "micro_batch", "measured"), [("gradients", 1, 16.9), ("full", 2, 9.4)]
)
def test_an_optimizer_on_the_host_has_the_gradients_there(
    sharding: Sharding, micro_batch: int, measured: float
) -> None:
    """Llama 7B with DeepSpeed on 8 A800s (chenyaofo), in GiB allocated."""
    shape = replace(model("llama-2-7b"), seq_len=4096)
    layout = Layout(
        backend="torchtitan", data=8, sharding=sharding, micro_batch=micro_batch,
        grad_accumulation=8 // micro_batch, recompute="full", offload=True,
    )  # fmt: skip
    habits = MemoryHabits(fused_adam=True, offloads="gradients", step_copies=2)
    found = memory(shape, layout, Assumptions(fp32_gradients=False, habits=habits))
    assert found.gradients == 0
    assert found.allocated == pytest.approx(measured, rel=0.08)


def test_fsdp2_offloads_all_states_but_the_buffers_of_its_all_reduces() -> None:
    shape = replace(model("llama-2-7b"), seq_len=64)
    assumed = Assumptions.usual("bf16", hardware().gpu("h100"), "torchtitan")
    layout = Layout(
        backend="torchtitan", data=8, sharding="full", recompute="full", grad_accumulation=2,
        offload=True,
    )  # fmt: skip
    found = memory(shape, layout, assumed)
    assert found.parameters == found.gradients == found.optimizer == 0
    hybrid = memory(shape, replace(layout, sharding="hybrid", shard=4), assumed)
    assert hybrid.parameters == hybrid.optimizer == 0
    assert hybrid.gradients * 2**30 == pytest.approx(shape.parameters, rel=0.12)


def test_gathered_parameters_may_stay_until_the_backward_pass() -> None:
    """Llama 2 7B took 57 and 70 GiB with DeepSpeed's ZeRO-3 (FlagPerf), of which 12.6 are these."""
    shape = model("llama-2-7b")
    layout = Layout(backend="torchtitan", data=8, sharding="full", micro_batch=1)
    plain, keeping = (
        Assumptions(fp32_gradients=False, habits=MemoryHabits(keeps_gathered=keeps))
        for keeps in (False, True)
    )
    layers = 2 * shape.layers * shape.layer_parameters()
    more = memory(shape, layout, keeping).allocated - memory(shape, layout, plain).allocated
    assert more * 2**30 == pytest.approx(layers, rel=1e-3)


def test_experts_that_are_not_sharded_are_used_where_they_are() -> None:
    """gpt-oss-20b took 25.5 GiB with 8 expert ranks, and 60.3 with sharded experts, of which FSDP2
    keeps the gathered ones (Halo: reshard_after_forward=False, states of 16 bits)."""
    shape = replace(model("gpt-oss-20b"), seq_len=4096)
    layout = Layout(backend="torchtitan", data=8, sharding="full", micro_batch=1, recompute="full")
    habits = MemoryHabits(keeps_gathered=True)
    assumed = Assumptions(narrow_states=True, loss_bytes=8, habits=habits)
    found = [memory(shape, replace(layout, expert=ranks), assumed).allocated for ranks in (1, 8)]
    assert found == pytest.approx([60.3, 25.5], rel=0.04)
