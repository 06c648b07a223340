"""A plan is for one backend, and its file launches without changes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain.diagnostics import UsageError
from dtrain.launchplan.build import build
from dtrain.parallelism.answer.alternatives import faster_backend, hidden_exchange, whole_graph
from dtrain.parallelism.backends import refusals
from dtrain.parallelism.cluster.efficiency import of_family
from dtrain.parallelism.cluster.hardware import Precision
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.parallelism.model.models import model, models
from dtrain.parallelism.question import Question
from dtrain.parallelism.search import Plan
from dtrain.planning.batch import usual_batch
from dtrain.planning.question import pose
from dtrain.planning.request import PlanRequest
from dtrain.planning.written import written
from dtrain.runtime.layout import BackendName, Layout
from dtrain.spec.load import parse

CLUSTERS = (
    ("rtx-4090", 4), ("a100-80gb", 64), ("a100-40gb", 16), ("h100-80gb", 8), ("h100-80gb", 256),
    ("h200", 32), ("b200", 64), ("v100-32gb", 32), ("l40s", 16), ("mi300x", 64),
)  # fmt: skip


def ask(name: str, gpu: str, gpus: int, backend: BackendName = "runtime") -> Question:
    kind = hardware().gpu(gpu)
    cluster = hardware().cluster(kind, gpus)
    shape = model(name)
    batch = usual_batch(shape, gpus)
    precision = "bf16" if "bf16" in kind.flops else "fp16"
    made = of_family(kind.family)
    return Question(shape, cluster, made, batch, precision=precision, backend=backend)


@pytest.mark.parametrize(
    "place", range(len(CLUSTERS)), ids=lambda place: "-".join(map(str, CLUSTERS[place]))
)
def test_a_plan_launches_without_warnings(place: int) -> None:
    """Two models on each cluster, twenty kinds of models in all."""
    fitted = 0
    for known in models()[place * 6 : place * 6 + 120 : 60]:
        fitted += launches_without_warnings(ask(known.name, *CLUSTERS[place]))
    assert fitted


def launches_without_warnings(question: Question) -> bool:
    """Assert it of the question's plan, if one fits, and return whether one does."""
    answer = question.answer()
    if not answer.fits:
        return False
    layout = answer.best.layout
    assert not [*refusals(question.shape, layout, question.precision)]
    spec = parse(written(answer, None, file="new.yaml"), "new.yaml")
    assert not spec.warnings, question.shape
    assert spec.job.layout == layout
    assert build(spec).world_size == layout.world_size
    return True


def test_a_plan_with_experts_over_hosts_launches_without_warnings() -> None:
    question = replace(ask("qwen3-30b-a3b", "h100-80gb", 32, "megatron"), fixed={"expert": 32})
    assert launches_without_warnings(question)


@pytest.mark.parametrize(
    ("name", "asked", "reason"),
    [
        ("mixtral-8x7b", {"fixed": {"expert": 8, "recompute": "selective"}}, "selective recompute"),
        ("llama-3-8b", {"precision": "fp8"}, "fp8"),
        ("llama-3-8b", {"fixed": {"pipeline": 2, "sharding": "full"}}, "sharded parameters"),
        (
            "llama-3-8b",
            {"fixed": {"virtual_pipeline": 3, "sharding": "none"}},
            "pieces do not divide the 32",
        ),
        ("llama-3-8b", {"fixed": {"pipeline": 8, "data": 4}, "global_batch": 4}, "fewer micro-"),
        # Each of Megatron-LM's layouts needs something else.
        ("deepseek-v3", {"global_batch": 8}, "a step of 8 sequences on 32 GPUs"),
        ("gemma-2b", {"fixed": {"tensor": 2}}, "tensor 2, which does not divide the only key head"),
    ],
)
def test_unsupported_layouts_are_refused_with_a_backend_that_supports_them(
    name: str, asked: dict[str, Any], reason: str
) -> None:
    question = replace(ask(name, "h100-80gb", 32), **asked)
    with pytest.raises(UsageError, match=f"runtime does not support .*{reason}") as refused:
        question.answer()
    assert "`backend` megatron" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (PlanRequest(model="t5-11b", gpus=16, fixed={"pipeline": 2}), "a pipeline of an encoder"),
        (
            PlanRequest(model="qwen3-8b", gpus=8, lora_rank=8, base_bits=4, fixed={"tensor": 2}),
            "tensor or pipeline parallelism of weights of 4 bits",
        ),
        (
            PlanRequest(model="llama-3-8b", gpu="t4", gpus=1, lora_rank=16, base_bits=4),
            r"fp16 together with frozen weights of 4 bits \(QLoRA\)",
        ),
    ],
)
def test_a_constraint_that_no_backend_meets_is_named(asked: PlanRequest, reason: str) -> None:
    with pytest.raises(UsageError, match=f"no backend supports {reason}"):
        pose(asked).answer()


def test_the_hint_has_precisions_that_a_backend_has_for_the_model() -> None:
    asked = PlanRequest(model="llama-3-8b", gpu="t4", gpus=1, lora_rank=16, base_bits=4)
    with pytest.raises(UsageError) as refused:
        pose(asked).answer()
    assert refused.value.hint == "use `precision` fp32, another model or a GPU with bf16"
    assert pose(replace(asked, precision="fp32")).answer().plan.considered


def test_torchtitan_does_not_shard_the_optimizer_alone() -> None:
    question = replace(
        ask("llama-3-8b", "h100-80gb", 32, "torchtitan"), fixed={"sharding": "optimizer"}
    )
    with pytest.raises(UsageError, match=r"torchtitan does not support .*ZeRO-1"):
        question.answer()


@pytest.mark.parametrize(
    ("name", "layout", "precision", "reason"),
    [
        ("t5-11b", Layout(backend="megatron", pipeline=2), "bf16", "an encoder and a decoder"),
        ("flux-1-dev", Layout(backend="torchtitan", tensor=2), "bf16", "diffusion transformers"),
        ("flux-1-dev", Layout(backend="torchtitan", pipeline=2), "bf16", "diffusion transformers"),
        ("llama-3-8b", Layout(backend="torchtitan"), "fp16", "fp16"),
    ],
)
def test_what_the_software_of_others_does_not_support(
    name: str, layout: Layout, precision: Precision, reason: str
) -> None:
    assert any(reason in one for one in refusals(model(name), layout, precision))


def test_the_planner_chooses_another_backend_if_the_user_names_none() -> None:
    question = replace(ask("llama-3-8b", "h100-80gb", 32), precision="fp8", backend_from="")
    answer = question.answer()
    assert answer.best.layout.backend == "megatron"
    assert re.fullmatch(
        r"this plan is for .*`backend='megatron'`.*backend runtime does not support fp8.*",
        answer.notes[0],
    )


def test_offload_counts_when_backends_are_compared() -> None:
    """With offload, torchtitan takes a tenth less than Megatron-LM without it."""
    asked = PlanRequest(
        model_size="14B", gpu="rtx-4090", gpus=16, gpus_per_host=4, network_gbps=100.0
    )
    first, other = (plan.best for plan in pose(asked).answer().question.others[:2])
    assert first and other and first.time.total > other.time.total
    answer = pose(replace(asked, backend="megatron")).answer()
    offloaded = answer.question.others[0].best
    assert offloaded and offloaded.time.total < 0.92 * answer.best.time.total
    assert faster_backend(answer) == ""


def test_a_note_says_how_much_slower_the_runtime_would_be() -> None:
    answer = replace(ask("gpt-oss-120b", "h100-80gb", 64), backend_from="").answer()
    assert re.search(r"takes 1\.\d times as long", answer.notes[-1])


@pytest.mark.parametrize(
    ("name", "gpu", "gpus", "fixed", "reason"),
    [
        # Megatron-LM spreads experts over hosts, and has gradients of 16 bits for one micro-batch.
        ("qwen3-235b-a22b", "h100-80gb", 64, {}, "needs the optimizer in the hosts' memory"),
        ("gpt-oss-20b", "h200", 1, {"offload": True}, "has no layout that fits"),
    ],
)
def test_the_planner_leaves_a_backend_that_is_much_slower(
    name: str, gpu: str, gpus: int, fixed: dict[str, bool], reason: str
) -> None:
    question = replace(ask(name, gpu, gpus), backend_from="", fixed=fixed)
    answer = question.answer()
    assert answer.best.layout.backend == "megatron"
    assert re.search(reason, answer.notes[-1])
    assert faster_backend(answer) == ""
    required = replace(question, backend_from="backend").answer()
    assert required.best.layout.backend == "runtime"
    assert faster_backend(required)
    kept = replace(question, kept={"reduce": "bf16"})
    assert kept.answer().best.layout.backend == "runtime"


FILE = """\
cluster: {{hosts: ["gpu[01-{hosts:02}]"], gpus: {gpus}, gpu: {gpu}}}
job:
  framework: torch
  script: train.py
  strategy: {strategy}
  training: {training}
"""


@pytest.mark.parametrize(
    ("strategy", "model", "cluster", "fixed", "backend"),
    [
        ("3d", "qwen3-235b-a22b", (8, 8, "h100-80gb"), {}, "runtime"),
        ("auto", "qwen3-235b-a22b", (8, 8, "h100-80gb"), {}, "megatron"),
        ("none", "qwen3-235b-a22b", (8, 8, "h100-80gb"), {}, "megatron"),
        # No layout of the runtime fits.
        ("fsdp", "gpt-oss-20b", (1, 1, "h200"), {"offload": True}, "megatron"),
    ],
)
def test_a_strategy_of_the_file_keeps_its_backend_if_that_has_a_layout_that_fits(
    tmp_path: Path,
    strategy: str,
    model: str,
    cluster: tuple[int, int, str],
    fixed: dict[str, bool],
    backend: str,
) -> None:
    hosts, gpus, gpu = cluster
    file = tmp_path / "c.yaml"
    file.write_text(
        FILE.format(
            hosts=hosts, gpus=gpus, gpu=gpu, strategy=strategy, training="{precision: bf16}"
        )
    )
    answer = pose(PlanRequest(model=model, file=file, fixed=fixed)).answer()
    assert answer.best.layout.backend == backend
    # The gain of another backend is in a note, or the reason for it.
    assert bool(faster_backend(answer)) is (backend == "runtime")


def test_an_option_replaces_the_backend_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    text = FILE.format(hosts=1, gpus=8, gpu="h100-80gb", strategy="none", training="{}")
    file.write_text(text.replace("  training:", "  layout: {backend: megatron}\n  training:"))
    of_file, of_option = (
        pose(PlanRequest(model_size="7B", file=file, backend=name)).answer()
        for name in (None, "runtime")
    )
    assert of_file.best.layout.backend == "megatron"
    assert of_option.best.layout.backend == "runtime"


@pytest.mark.parametrize("asked", [{"precision": "fp8"}, {"state_bits": 16}])
def test_trials_have_no_other_backend(asked: dict[str, Any]) -> None:
    request = PlanRequest(model="llama-3-8b", gpus=8, gpu="h100-80gb", trials=2, **asked)
    with pytest.raises(UsageError, match="runtime does not support") as refused:
        pose(request).answer()
    assert refused.value.hint == "leave `trials` out, which only the backend runtime has"


def test_states_of_16_bits_are_half_as_large_and_torchtitans() -> None:
    request = PlanRequest(model="llama-3.2-3b", gpus=1, gpu="a100-80gb", state_bits=16)
    answer = pose(request).answer()
    assert answer.best.layout.backend == "torchtitan"
    assert "states of 16 bits" in answer.notes[0]
    assert 'need `training.dtype = "bfloat16"` in torchtitan' in answer.notes[1]
    found = answer.best.memory
    states = (found.parameters + found.gradients + found.optimizer) * 2**30
    assert states == pytest.approx(8 * answer.question.shape.parameters, rel=0.01)
    wide = pose(replace(request, state_bits=32, backend="torchtitan"))
    assert wide.candidate(answer.best.layout).memory.optimizer > 1.9 * found.optimizer


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"state_bits": 8}, "`state_bits=8` is not known"),
        ({"lora_rank": 8, "base_bits": 5}, "`base_bits=5` is not known"),
        ({"precision": "fp8"}, "`state_bits=16` needs bf16, not fp8"),
        ({"framework": "tensorflow"}, "`state_bits` applies only to torch"),
        ({"framework": "tensorflow", "backend": "megatron"}, "`backend` applies only to torch"),
    ],
)
def test_bits_of_states_and_frozen_weights_are_refused(asked: dict[str, Any], error: str) -> None:
    request = PlanRequest(model="llama-3-8b", gpus=8, gpu="h100-80gb", state_bits=16)
    with pytest.raises(UsageError, match=error):
        pose(replace(request, **asked))


def test_the_units_of_what_failures_cost() -> None:
    asked = PlanRequest(model="llama-3-8b", gpus=8, gpu="h100", tokens="1T", restart_minutes=10.0)
    found = pose(replace(asked, failure_rate=4.0, storage_gbs=2.0)).reliability
    assert (found.failures, found.restart, found.storage) == (4.0, 600.0, 2.0)


def test_states_of_16_bits_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        FILE.format(hosts=1, gpus=8, gpu="h100-80gb", strategy="none", training="{state_bits: 16}")
    )
    request = PlanRequest(model="llama-3-8b", file=file)
    assert pose(request).narrow_states
    assert not pose(replace(request, framework="tensorflow")).narrow_states
    with pytest.raises(UsageError, match=r"c\.yaml: job\.training\.state_bits 16 needs bf16, not"):
        pose(replace(request, precision="fp8"))
    assert not pose(replace(request, precision="fp8", state_bits=32)).narrow_states


DEEPSEEK = PlanRequest(
    model="deepseek-v3", gpus=2048, gpu="h800", precision="fp8", global_batch=15360
)
DEEPSEEK_STEP = 2.664e6 * 3600 / 2048 / (14.8e12 / (15360 * 4096))
"""Seconds of a step of DeepSeek-V3's pretraining: 14.8T tokens in 2.664M GPU-hours."""


def test_exchanges_beside_the_computation_give_the_layout_and_time_of_deepseek_v3() -> None:
    answer = pose(replace(DEEPSEEK, overlap_experts=True)).answer()
    best = answer.best
    assert (best.layout.pipeline, best.layout.expert, best.layout.tensor) == (16, 64, 1)
    assert best.time.total == pytest.approx(DEEPSEEK_STEP, rel=0.09)
    assert any("overlap-moe-expert-parallel-comm" in note for note in answer.notes)
    assert hidden_exchange(answer) == ""


def test_a_plan_says_what_exchanges_beside_the_computation_would_gain() -> None:
    fixed = {"pipeline": 16, "expert": 64}
    asked = replace(DEEPSEEK, fixed=fixed)
    answer = pose(asked).answer()
    hidden = pose(replace(asked, overlap_experts=True)).answer().best
    assert hidden.layout == answer.best.layout
    line = hidden_exchange(answer)
    assert f"would take {hidden.time.total:.1f} s for this layout" in line
    assert "`overlap_experts`" in line
    assert hidden_exchange(ask("llama-3-8b", "h100-80gb", 32).answer()) == ""


def test_a_plan_says_what_one_graph_of_a_step_would_gain() -> None:
    fixed = {"tensor": 1, "pipeline": 2, "context": 1, "expert": 32, "micro_batch": 1}
    asked = PlanRequest(
        model="deepseek-v3",
        gpus=256,
        gpu="gb300",
        precision="fp8",
        global_batch=4096,
        overlap_experts=True,
        fixed=fixed,
    )
    answer = pose(asked).answer()
    graph = pose(replace(asked, cuda_graph=True)).answer()
    assert answer.question.backend == graph.question.backend == "megatron"
    assert graph.best.time.host == 0
    same = graph.question.candidate(answer.best.layout)
    line = whole_graph(answer)
    assert f"would take {same.time.total:.1f} s for this layout" in line
    assert any("--cuda-graph-impl full_iteration" in note for note in graph.notes)
    assert whole_graph(graph) == ""
    # Long micro-batches keep the GPU busy.
    assert whole_graph(ask("llama-3-70b", "h100-80gb", 64).answer()) == ""


def test_only_megatron_has_one_graph_of_a_step() -> None:
    asked = PlanRequest(model="llama-3-8b", gpus=8, gpu="h100", cuda_graph=True)
    assert pose(asked).answer().question.backend == "megatron"
    with pytest.raises(UsageError, match="does not support a CUDA graph of the whole step"):
        pose(replace(asked, backend="torchtitan")).answer()


def test_devices_without_cuda_have_no_cuda_graph() -> None:
    asked = PlanRequest(model="llama-3-8b", gpus=8, gpu="tpu-v5p", cuda_graph=True)
    with pytest.raises(UsageError, match="`cuda_graph`: tpu-v5p has no CUDA graphs") as caught:
        pose(asked)
    assert caught.value.hint == "leave it out"


def test_only_megatron_exchanges_beside_the_computation_and_without_full_recompute() -> None:
    mixture = PlanRequest(model="mixtral-8x7b", gpus=16, gpu="h100", overlap_experts=True)
    answer = pose(mixture).answer()
    assert answer.question.backend == "megatron"
    assert {one.layout.recompute for one in answer.plan.layouts} == {"none", "selective"}
    # With full recompute, micro-batches can be longer: here that gains more.
    other = pose(replace(mixture, backend="megatron", overlap_experts=False)).answer().best
    assert other.layout.recompute == "full" and other.time.total < answer.best.time.total
    assert f"would take {other.time.total:.1f} s a step" in hidden_exchange(answer)
    # This one would be slower with full recompute, though it would need less of the memory.
    large = replace(mixture, model="mixtral-8x22b", gpus=64)
    assert hidden_exchange(pose(large).answer()) == ""
    with pytest.raises(UsageError, match="does not go with `recompute='full'`"):
        pose(replace(mixture, fixed={"recompute": "full"}))
    with pytest.raises(UsageError, match="runtime does not support exchanges between experts"):
        pose(replace(mixture, backend="runtime")).answer()
    with pytest.raises(UsageError, match="is for models with experts"):
        pose(replace(mixture, model="llama-3-8b"))
    with pytest.raises(UsageError, match="applies only to torch"):
        pose(replace(mixture, framework="tensorflow"))


def test_a_faster_backend_is_shown_in_one_line() -> None:
    line = faster_backend(ask("qwen3-30b-a3b", "h100-80gb", 32).answer())
    assert line.startswith("`backend='megatron'`")
    assert re.search(r"would be [\d.]+ % faster: .*experts over \d", line)


def test_a_backend_with_a_fitting_layout_is_shown_in_one_line() -> None:
    answer = ask("mixtral-8x7b", "h100-80gb", 32).answer()
    too_large = tuple(one for one in answer.plan.layouts if not one.fits)
    unfit = replace(answer, plan=Plan(too_large))
    assert " fits: " in faster_backend(unfit)


def test_racks_count_only_if_there_are_several() -> None:
    request = PlanRequest(model_size="7B", gpus=32, rack_hosts=2, rack_gbps=100)
    several = pose(request).cluster
    assert (several.rack_hosts, several.between_racks) == (2, 12.5)
    assert pose(replace(request, rack_hosts=4)).cluster.rack_hosts == 0
    # Faster than the hosts' own network means as fast.
    assert pose(replace(request, rack_gbps=5000)).cluster.between_racks == several.network


def test_a_layout_for_another_backend_is_the_scripts_own() -> None:
    answer = ask("llama-3-8b", "a100-80gb", 8, "megatron").answer()
    text = written(answer, None, file="new.yaml")
    assert "backend: megatron" in text
    assert parse(text, "new.yaml").job.strategy == "none"


def test_published_layouts_with_uneven_pieces_are_planned() -> None:
    """Llama 3.1 405B has 126 layers in 64 pieces, or in 128 with embedding and output layer, and
    DeepSeek-V3 61 layers in 32 (Megatron-LM)."""
    for name, fixed in (
        ("llama-3.1-405b", {"tensor": 8, "pipeline": 8, "virtual_pipeline": 8}),
        ("llama-3.1-405b", {"tensor": 8, "pipeline": 16, "virtual_pipeline": 8}),
        ("deepseek-v3", {"pipeline": 8, "virtual_pipeline": 4, "expert": 32}),
    ):
        question = replace(ask(name, "h100-80gb", 256, "megatron"), fixed=fixed, shape=model(name))
        assert question.answer().plan.considered
        with pytest.raises(UsageError, match="whose pieces do not divide the"):
            replace(question, backend="runtime").answer()
        many = {**fixed, "virtual_pipeline": 32}
        with pytest.raises(UsageError, match="pieces"):
            replace(question, fixed=many).answer()


def test_no_backend_runs_on_tpus() -> None:
    request = PlanRequest(model="llama-2-7b", gpus=256, gpu="tpu-v5e", global_batch=512)
    for question in (pose(request), pose(replace(request, state_bits=16))):
        answer = question.answer()
        assert "no backend of dtrain runs on tpu-v5e" in answer.notes[-1]
        assert faster_backend(answer) == ""
