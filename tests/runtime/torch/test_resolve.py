"""The layout of a run, and layouts that are refused before any rank communicates."""

from __future__ import annotations

import re

import pytest

from dtrain.parallelism.backends import BACKENDS
from dtrain.runtime.layout import Layout, Training
from dtrain.runtime.torch.resolve import StartedRanks, over, resolve

pytestmark = pytest.mark.torch


def test_a_strategy_alone_makes_a_layout() -> None:
    world, batch = StartedRanks(8, 4), Training(global_batch=16)
    assert resolve("ddp", None, batch, world) == Layout(data=8, micro_batch=2)
    assert resolve("none", None, Training(), world) == Layout(data=8)
    assert resolve("fsdp", None, batch, world).sharding == "full"
    hsdp = resolve("hsdp", None, batch, world)
    assert (hsdp.sharding, hsdp.shard, hsdp.data) == ("hybrid", 4, 8)
    tensor = resolve("tensor", None, batch, world)
    assert (tensor.tensor, tensor.sequence_parallel, tensor.micro_batch) == (8, True, 16)
    assert resolve("pipeline", None, batch, world).grad_accumulation == 16
    pipeline = resolve("pipeline", None, Training(global_batch=64), world)
    assert (pipeline.micro_batch, pipeline.grad_accumulation) == (4, 16)
    assert resolve("pipeline", None, Training(global_batch=24), world).grad_accumulation == 24
    assert resolve("data_parallel", None, batch, StartedRanks(1, 1, devices=4)).data == 4
    for strategy in ("fsdp", "hsdp", "tensor", "pipeline"):
        assert resolve(strategy, None, Training(), StartedRanks(1, 1)).world_size == 1


def test_a_script_that_does_not_know_the_layout_chooses_the_batch() -> None:
    layout = Layout(pipeline=2, data=2, grad_accumulation=4)
    resolved = resolve("3d", layout, Training(global_batch=32), StartedRanks(4, 2), own_batch=True)
    assert (resolved.global_batch, resolved.grad_accumulation) == (32, 16)


def test_states_are_sharded_within_a_host() -> None:
    layout = Layout(tensor=2, data=8, sharding="hybrid")
    assert resolve("3d", layout, Training(), StartedRanks(16, 8)).shard == 4
    assert resolve("3d", layout, Training(), StartedRanks(16, 2)).shard == 1


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_each_precision_that_a_plan_for_the_runtime_has(precision: str) -> None:
    assert precision in BACKENDS["runtime"].precisions
    resolve("ddp", None, Training(precision=precision), StartedRanks(1, 1))


def test_the_cluster_file_overrides_the_script() -> None:
    script = Training(global_batch=32, precision="fp32")
    assert over(script, Training(precision="bf16")) == Training(32, "bf16")


@pytest.mark.parametrize(
    ("strategy", "layout", "training", "reason"),
    [
        ("dpp", None, Training(), "strategy 'dpp' is not one of"),
        ("3d", None, Training(), "strategy 3d needs a layout"),
        ("3d", Layout(data=0), Training(global_batch=8), "data 0 is not a valid size"),
        ("3d", Layout(tensor=0, sharding="hybrid"), Training(), "tensor 0 is not a valid size"),
        ("ddp", None, Training(global_batch=0), "a global batch of 0 cannot be shared"),
        ("fsdp", None, Training(precision="fp8"), "fp8 needs"),
        ("fsdp", None, Training(precision="nvfp4"), "nvfp4 needs"),
        ("fsdp", None, Training(state_bits=16), "keeps weights in 32 bits"),
        ("fsdp", None, Training(overlap_experts=True), "does not exchange tokens beside"),
        ("fsdp", None, Training(cuda_graph=True), "has no CUDA graph of the whole step"),
        (
            "3d",
            Layout(context=4, data=2),
            Training(),
            "is for 8 ranks (tensor 1 x pipeline 1 x context 4 x data 2), but 4",
        ),
        (
            "3d",
            Layout(data=4, expert=2, recompute="selective"),
            Training(),
            "cannot recompute a layer selectively",
        ),
        (
            "3d",
            Layout(data=4, offload_activations=True, recompute="full"),
            Training(),
            "offload_activations does not move",
        ),
        (
            "3d",
            Layout(data=4, sharding="hybrid", shard=2, expert=0),
            Training(),
            "expert 0 is not a valid size",
        ),
        ("data_parallel", None, Training(), "with 4 processes, or a split model, use ddp"),
        ("3d", Layout(data=4), Training(global_batch=6), "use a multiple of 4"),
        (
            "3d",
            Layout(data=4, grad_accumulation=3),
            Training(global_batch=8),
            "sets a global batch of 12 (data 4 x micro_batch 1 x grad_accumulation 3), but",
        ),
        ("3d", Layout(tensor=4, sharding="full"), Training(), "there is only one data rank"),
        ("3d", Layout(data=4, sequence_parallel=True), Training(), "but tensor is 1"),
        (
            "3d",
            Layout(data=4, sharding="hybrid", shard=3),
            Training(),
            "shard is 3, which does not",
        ),
        (
            "3d",
            Layout(data=4, sharding="hybrid", shard=0),
            Training(),
            "shard 0 is not a valid size",
        ),
        ("3d", Layout(data=4, virtual_pipeline=2), Training(), "but pipeline is 1"),
        (
            "3d",
            Layout(pipeline=2, data=2, schedule="zb-1p", grad_accumulation=4),
            Training(),
            "zb-1p trains wrongly with 2 data ranks",
        ),
        (
            "3d",
            Layout(pipeline=4, schedule="zb-v", grad_accumulation=4, recompute="full"),
            Training(),
            "both parts would recompute the same activations",
        ),
        (
            "3d",
            Layout(pipeline=4, grad_accumulation=2),
            Training(),
            "grad_accumulation is 2, pipeline 4; raise the global batch to 4 or more",
        ),
        (
            "3d",
            Layout(pipeline=4, virtual_pipeline=2, grad_accumulation=6),
            Training(),
            "6 micro-batches do not make whole rounds of the 4 stages",
        ),
        ("3d", Layout(data=4, schedule="zb-2p"), Training(), "schedule 'zb-2p' is not one of"),
    ],
)
def test_refused(strategy: str, layout: Layout | None, training: Training, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        resolve(strategy, layout, training, StartedRanks(4, 2))
