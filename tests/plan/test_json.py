"""The JSON object of a plan has the documented keys and consistent numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

Plan = Callable[..., dict[str, Any]]

SIZE = {"type": "integer", "minimum": 1}
SHARE = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
SPLIT = {
    "tensor": SIZE,
    "pipeline": SIZE,
    "virtual_pipeline": SIZE,
    "context": SIZE,
    "expert": SIZE,
    "data": SIZE,
    "sharding": {"enum": ["none", "optimizer", "gradients", "full", "hybrid"]},
    "shard": {"type": ["integer", "null"]},
    "schedule": {"type": "string"},
    "micro_batch": SIZE,
    "grad_accumulation": SIZE,
    "global_batch": SIZE,
    "recompute": {"enum": ["none", "selective", "full"]},
    "sequence_parallel": {"type": "boolean"},
    "offload": {"type": "boolean"},
    "precision": {"enum": ["bf16", "fp16", "fp8", "nvfp4", "tf32", "fp32"]},
    "memory_gib": {
        "type": "object",
        "required": ["parameters", "gradients", "optimizer", "activations", "total", "limit"],
        "additionalProperties": {"type": "number", "minimum": 0},
    },
}
COSTS = {
    "fits": {"type": "boolean"},
    "memory_interval_gib": {"type": "array", "minItems": 2, "maxItems": 2},
    "time_s": {
        "type": "object",
        "required": ["compute", "bubble", "total"],
        "additionalProperties": {"type": "number", "minimum": 0},
    },
    "time_interval_s": {"type": "array", "minItems": 2, "maxItems": 2},
    "tokens_per_s_per_gpu": {"type": "number", "exclusiveMinimum": 0},
    "model_tflops_per_gpu": {"type": "number", "exclusiveMinimum": 0},
    "mfu": SHARE,
    "mfu_causal": SHARE,
    "hfu": SHARE,
    "hfu_causal": SHARE,
}
SCHEMA = {
    "type": "object",
    "required": [
        "schema", "model", "cluster", "layouts", "rejected", "considered", "fitting",
        "explanation", "notes",
    ],
    "properties": {
        "schema": {"const": 1},
        "model": {"required": ["name", "parameters", "layers", "hidden", "seq_len"]},
        "cluster": {"required": ["gpu", "gpus", "hosts", "gpus_per_host", "network_gbps"]},
        "layouts": {
            "items": {"required": [*SPLIT, *COSTS], "properties": {**SPLIT, **COSTS}}
        },
        "rejected": {
            "items": {
                "required": ["reason", "count", "example"],
                "properties": {"count": SIZE, "example": {"required": [*SPLIT]}},
            }
        },
    },
}  # fmt: skip

JOBS = (
    ("--model-size", "100B"),
    ("--model-size", "100B", "--gpus", "16384", "--gpu", "h100-80gb"),
    ("--model", "mixtral-8x7b", "--gpus", "32", "--gpu", "h100"),
    ("--model", "llama-3-8b", "--gpus", "1", "--gpu", "rtx-4090"),
    ("--model-size", "7B", "--gpus", "4", "--gpu", "l4"),
    ("--model-size", "1.3B", "--gpus", "24", "--precision", "fp16", "--seq-len", "1024"),
    ("--model-size", "350M", "--gpus", "8", "--gpu", "v100-32gb"),
)


@pytest.mark.parametrize("job", JOBS, ids=" ".join)
def test_the_object_is_complete_and_consistent(plan: Plan, job: tuple[str, ...]) -> None:
    found = plan(*job, "--tokens", "20B")
    jsonschema.validate(found, SCHEMA)
    cluster, seq_len = found["cluster"], found["model"]["seq_len"]
    for layout in found["layouts"]:
        gpus = math.prod(layout[size] for size in ("tensor", "pipeline", "context", "data"))
        assert gpus == cluster["gpus"] == cluster["hosts"] * cluster["gpus_per_host"]
        assert layout["global_batch"] == math.prod(
            layout[size] for size in ("data", "micro_batch", "grad_accumulation")
        )
        adds_up(layout["memory_gib"], "cached", "limit")
        adds_up(layout["time_s"])
        for part, interval in (
            ("time_s", "time_interval_s"),
            ("memory_gib", "memory_interval_gib"),
        ):
            low, high = layout[interval]
            assert 0 < low < layout[part]["total"] < high
        memory = layout["memory_gib"]
        assert layout["fits"] == (memory["total"] <= memory["limit"])
        tokens = layout["global_batch"] * seq_len / layout["time_s"]["total"]
        assert layout["tokens_per_s_per_gpu"] * gpus == pytest.approx(tokens, rel=1e-4)
        assert layout["mfu"] == pytest.approx(
            layout["model_tflops_per_gpu"] / cluster["peak_tflops"], rel=1e-4
        )
        assert layout["mfu_causal"] < layout["mfu"] <= layout["hfu"]
        assert layout["mfu_causal"] <= layout["hfu_causal"] <= layout["hfu"]
        assert layout["training_days"] == pytest.approx(20e9 / tokens / 86400, rel=1e-4)
    for group in found["rejected"]:
        memory = group["example"]["memory_gib"]
        adds_up(memory, "cached", "limit")
        assert memory["total"] > memory["limit"]
    assert found["considered"] == found["fitting"] + sum(
        group["count"] for group in found["rejected"]
    )


def adds_up(parts: dict[str, float], *others: str) -> None:
    given = sum(value for name, value in parts.items() if name not in ("total", *others))
    assert given == pytest.approx(parts["total"], abs=1e-6)


def test_layouts_are_ranked_fit_and_differ(plan: Plan) -> None:
    layouts = plan("--model-size", "100B", "--top", "12")["layouts"]
    assert len(layouts) == 12
    assert all(layout["fits"] for layout in layouts)
    times = [layout["time_s"]["total"] for layout in layouts]
    # A layout that splits in more ways, or fills the GPU, and is hardly faster ranks lower.
    assert times == pytest.approx(sorted(times), rel=0.12)
    assert times[-1] > times[0]
    kinds = {
        tuple(
            layout[key]
            for key in ("tensor", "pipeline", "context", "expert", "sharding", "recompute")
        )
        for layout in layouts
    }
    assert len(kinds) == 12


def test_the_training_belongs_to_the_first_layout(plan: Plan) -> None:
    asked = ("--model-size", "7B", "--gpus", "8", "--gpu", "h100", "--tokens", "2T")
    found = plan(*asked)
    training, best = found["training"], found["layouts"][0]
    assert training["tokens"] == 2 * 10**12
    assert training["days"] == pytest.approx(best["training_days"])
    assert training["gpu_hours"] == pytest.approx(training["days"] * 24 * 8, rel=1e-5)
    per_step = best["global_batch"] * found["model"]["seq_len"]
    assert training["steps"] == -(-2 * 10**12 // per_step)
    failing = training["with_failures"]
    assert failing["goodput"] == pytest.approx(training["days"] / failing["days"], rel=1e-4)
    assert failing["days_at_least"] < failing["days"] < failing["days_at_most"]
    assert training["price"] is None
    assert training["energy_mwh"] == pytest.approx(failing["gpu_hours"] * 700 / 1e6, rel=1e-5)
    priced = plan(*asked, "--price-per-gpu-hour", "2.5")
    assert priced["training"]["price"] == pytest.approx(2.5 * failing["gpu_hours"], rel=1e-5)
    assert "training" not in plan(*asked[:-2])


def test_if_nothing_fits_the_object_suggests_changes(plan: Plan) -> None:
    found = plan("--model-size", "1T", "--gpus", "8", "--gpu", "h100-80gb")
    assert found["layouts"] == []
    assert found["rejected"]
    assert "training" not in found
    explanation = " ".join(found["explanation"])
    assert "Offload needs 1" in explanation
    count = next(word for sentence in found["explanation"] for word in [sentence.split()[0]]
                 if " x h100-80gb (" in sentence)  # fmt: skip
    enough = plan("--model-size", "1T", "--gpus", count.replace(",", ""), "--gpu", "h100-80gb")
    assert enough["fitting"]
    assert not enough["layouts"][0]["offload"]


def test_what_is_offloaded_is_compared_with_the_usual_host(plan: Plan) -> None:
    best = plan("--model-size", "40B", "--gpus", "4", "--gpu", "rtx-4090", "--offload")["layouts"][
        0
    ]
    host = best["host_memory_gib"]
    assert host["pinned"] < host["total"] and host["usual"] == 256 < host["total"]
    assert "host_memory_gib" not in plan("--model-size", "1B", "--gpus", "8")["layouts"][0]


def test_a_mixture_spreads_its_experts_evenly(plan: Plan) -> None:
    found = plan(
        "--model",
        "mixtral-8x7b",
        "--gpus",
        "32",
        "--gpu",
        "h100",
        "--expert",
        "8",
        "--backend",
        "megatron",
    )
    assert found["model"]["active_parameters"] < found["model"]["parameters"]
    for layout in found["layouts"]:
        assert layout["expert"] == 8
        assert layout["data"] * layout["context"] % 8 == 0


def test_the_object_for_tensorflow(plan: Plan) -> None:
    small = plan("--model-size", "350M", "--framework", "tensorflow", "--gpus", "8")
    assert small["schema"] == 1
    assert small["strategy"] == "mirrored"
    large = plan("--model-size", "100B", "--framework", "tensorflow")
    assert large["strategy"] is None
    assert large["torch"]["memory_gib"] < 80
