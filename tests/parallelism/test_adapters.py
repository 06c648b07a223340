"""Plans that train only adapters of a frozen model (LoRA, QLoRA)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtrain import api
from dtrain.diagnostics import UsageError
from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cluster.efficiency import of_family
from dtrain.parallelism.cluster.hardware import GpuCluster
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.cost.layer import EXPANSION
from dtrain.parallelism.cost.memory import memory
from dtrain.parallelism.cost.speed import flop_per_token
from dtrain.parallelism.cost.stages import adapters_of_stage
from dtrain.parallelism.model.adapters import Lora
from dtrain.parallelism.model.models import model
from dtrain.parallelism.model.shape import Shape
from dtrain.planning.request import PlanRequest
from dtrain.runtime.layout import BackendName, Layout

ASSUMED = Assumptions()


def adapted(name: str, lora: Lora) -> Shape:
    return replace(model(name), lora=lora)


def candidate(shape: Shape, layout: Layout) -> Candidate:
    chosen = hardware().gpu("a100-80gb")
    cluster = GpuCluster(chosen, layout.world_size, min(8, layout.world_size), 200.0)
    return Candidate(shape, layout, cluster, of_family(chosen.family), ASSUMED)


@pytest.mark.parametrize(
    ("name", "rank", "trained"),
    # As the library peft prints them, with adapters of all linear layers.
    [("llama-3-8b", 16, 41_943_040), ("llama-2-7b", 64, 159_907_840)],
)
def test_the_adapters_have_as_many_parameters_as_peft_counts(
    name: str, rank: int, trained: int
) -> None:
    assert adapted(name, Lora(rank)).trained_parameters == trained


@pytest.mark.parametrize("name", ["llama-3-70b", "mixtral-8x7b", "deepseek-v3"])
def test_a_frozen_model_needs_two_thirds_of_the_flop(name: str) -> None:
    whole, frozen = model(name), adapted(name, Lora(8))
    assert 0.66 < flop_per_token(frozen) / flop_per_token(whole) < 0.75


def test_the_products_of_large_adapters_take_time() -> None:
    fast = [
        candidate(adapted("llama-3-8b", Lora(rank)), Layout(backend="megatron")).speed.mfu
        for rank in (16, 1024, 4096)
    ]
    assert max(fast) < 0.8


@pytest.mark.parametrize("backend", ["megatron", "torchtitan"])
def test_only_adapters_have_gradients_and_states(backend: BackendName) -> None:
    layout = Layout(backend=backend, recompute="full", grad_accumulation=2)
    shape = adapted("llama-3-8b", Lora(16))
    need = memory(shape, layout, ASSUMED)
    states = need.gradients + need.optimizer
    assert states == pytest.approx(16 * shape.trained_parameters / 2**30, rel=0.01)
    assert need.parameters == pytest.approx(2 * shape.parameters / 2**30, rel=0.02)


def test_frozen_matrices_of_four_bits_take_a_quarter() -> None:
    layout = Layout(backend="torchtitan", recompute="full")
    need = memory(adapted("llama-3-70b", Lora(16, base_bits=4)), layout, ASSUMED)
    # 68.5B parameters in layers at 0.516 bytes, 2.1B in embedding and output layer at 2.
    assert need.parameters == pytest.approx((68.5e9 * 0.516 + 2.1e9 * 2) / 2**30, rel=0.03)


def test_frozen_matrices_in_fp8_take_half() -> None:
    """MLPerf Training 5.0, Llama 2 70B with LoRA on a B200: 168.8 GiB, with NeMo's fp8_params."""
    layout = Layout(backend="megatron", data=8, sharding="optimizer")
    shape = adapted("llama-2-70b", Lora(16, "attention", base_bits=8)).with_lengths(8192, 32000)
    need = memory(shape, layout, replace(ASSUMED, precision="fp8"))
    assert need.parameters == pytest.approx((68.5e9 + 0.5e9 * 2) / 2**30, rel=0.02)
    assert need.allocated == pytest.approx(168.8, rel=0.03)


def test_a_step_is_faster_than_with_all_weights_and_slower_than_its_forward_pass() -> None:
    layout = Layout(
        backend="megatron", tensor=8, sequence_parallel=True, data=8, sharding="optimizer"
    )
    whole = candidate(model("llama-3-70b"), layout).time
    frozen = candidate(adapted("llama-3-70b", Lora(16)), layout).time
    assert 0.6 < frozen.compute / whole.compute < 0.8
    assert frozen.data < 0.05 * whole.data
    assert frozen.optimizer < 0.05 * whole.optimizer


def test_adapters_of_experts_are_spread_like_the_experts() -> None:
    shape = adapted("mixtral-8x7b", Lora(4))
    every = adapters_of_stage(shape, Layout(backend="megatron"), shape.layers)
    spread = adapters_of_stage(shape, Layout(backend="megatron", expert=8, data=8), shape.layers)
    assert sum(every) == shape.trained_parameters
    assert spread == (every[0], every[1] / 8)


def test_frozen_experts_that_each_rank_has_once_are_not_sharded_again() -> None:
    shape = adapted("mixtral-8x7b", Lora(4))
    layout = Layout(backend="megatron", expert=8, data=8, sharding="full")
    held = memory(shape, layout, ASSUMED).parameters
    # Every parameter is on one of the 8 GPUs, and the largest part of it in 16 bits.
    assert 8 * held * 2**30 >= 2 * (shape.parameters - shape.trained_parameters)


def test_the_plan_is_for_a_backend_that_trains_adapters() -> None:
    request = PlanRequest(model="llama-3-8b", gpus=1, gpu="a100", lora_rank=16)
    assert api.plan(request).question.backend == "megatron"
    four_bits = replace(request, base_bits=4, gpu="rtx-4090", seq_len=2048)
    answer = api.plan(four_bits)
    assert answer.fits
    assert answer.question.backend == "torchtitan"


def test_frozen_weights_of_8_bits_are_those_that_fp8_reads() -> None:
    wide, narrow = (
        api.plan(
            PlanRequest(
                model="llama-2-70b", gpus=8, gpu="h100", lora_rank=16, precision="fp8",
                base_bits=bits, fixed={"tensor": 4, "data": 2, "pipeline": 1, "context": 1},
            )
        ).best.memory.parameters * 4
        for bits in (16, 8)
    )  # fmt: skip
    layers = model("llama-2-70b").layers * model("llama-2-70b").layer_parameters() / 2**30
    assert wide - narrow == pytest.approx(layers, rel=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_rank": 0}, "is not a rank"),
        ({"lora_rank": 10**6}, "is not a rank"),
        ({"lora_targets": "mlp"}, "`lora_targets='mlp'` is not known"),
        ({"base_bits": 2}, "`base_bits=2` is not known"),
        ({"base_bits": 8}, "`base_bits=8` needs fp8, not bf16"),
        (
            {"base_bits": 8, "precision": "fp8", "backend": "torchtitan"},
            "does not support frozen weights of 8 bits",
        ),
        ({"lora_rank": None, "base_bits": 4}, "adapters"),
        ({"framework": "tensorflow"}, "torch layouts"),
        ({"backend": "runtime"}, "does not support LoRA"),
        ({"backend": "megatron", "base_bits": 4}, "QLoRA"),
    ],
)
def test_impossible_requests_are_refused(change: dict[str, object], message: str) -> None:
    request = PlanRequest(model="llama-3-8b", gpus=8, gpu="h100", lora_rank=16)
    with pytest.raises(UsageError, match=message):
        api.plan(replace(request, **change), strategies=True)  # type: ignore[arg-type]


def test_each_pass_expands_matrices_of_4_bits() -> None:
    shape = adapted("llama-2-7b", Lora(8, base_bits=4))
    layout = Layout(backend="torchtitan", recompute="full")
    fused = candidate(shape, layout)
    separate = replace(fused, assumed=replace(ASSUMED, separate_expansion=True))
    size = shape.layers * shape.layer_parameters(moe=False)
    bandwidth = fused.cluster.gpu.bandwidth * 1e9 * fused.efficiency.stream
    more = (EXPANSION - 2 - shape.frozen_matrix_bytes) * size / bandwidth
    assert separate.time.recompute - fused.time.recompute == pytest.approx(more)
    assert separate.time.compute - fused.time.compute == pytest.approx(2 * more)


def test_the_host_of_short_sequences_is_slower_with_hooks() -> None:
    layout = Layout(backend="torchtitan", recompute="full")
    shape = adapted("llama-2-7b", Lora(8))
    for length, waits in ((256, True), (8192, False)):
        one = candidate(shape.with_lengths(length, shape.vocab), layout)
        hooked = replace(one, assumed=replace(ASSUMED, host_work=80))
        assert (hooked.time.total > 1.5 * one.time.total) == waits
        assert (hooked.time.total == one.time.total) == (not waits)
