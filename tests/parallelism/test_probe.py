"""Plans with measurements of the machines: `dtrain plan FILE --probe`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain import api
from dtrain.checks.evidence import Evidence
from dtrain.checks.probe import probe
from dtrain.diagnostics import PrepareError, UsageError
from dtrain.launchplan.build import build
from dtrain.messages import facts
from dtrain.messages.decode import decode
from dtrain.parallelism.cluster.efficiency import of_family
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.parallelism.cluster.probe import Probe
from dtrain.planning.question import pose
from dtrain.planning.request import PlanRequest
from dtrain.spec.load import parse
from dtrain_cli.views.layouts import as_text
from dtrain_cli.views.layouts_html import page
from dtrain_cli.views.paper import Paper

TEXT = """
cluster: {hosts: [a, b], gpus: 0, slots: 2, transport: local}
job: {framework: torch, script: train.py}
"""
SIZE = 64 << 20


def compute(speed: float = 1.0, device: str = "cpu", **more: Any) -> dict[str, Any]:
    rows = [[1024, 0.04 * speed], [2048, 0.05 * speed]]
    return {
        "device": device,
        "memory": 8 << 30,
        "precision": {"bfloat16": [[1024, 0.01], [2048, 0.02]], **more, "float32": rows},
        "copy": 10e9,
        "attention": 0.02,
    }


def report(rank: int, **computed: Any) -> dict[str, Any]:
    found = {
        "failed": "",
        "backend": "gloo",
        "all": [[SIZE, 0.5]],
        "inside": [[SIZE, 0.1]],
        "pairs": [],
        "compute": compute(**computed),
    }
    return {**decode(facts.MEASURED, found, "said"), "rank": rank}


def evidence(*reports: dict[str, Any], **fields: Any) -> Evidence:
    plan = build(parse(TEXT, "cluster.yaml"), port=29500)
    half = len(reports) // 2
    return Evidence(plan, (), bandwidth={"a": reports[:half], "b": reports[half:]}, **fields)


def measured() -> Probe:
    return probe(evidence(*map(report, range(3)), report(3, speed=0.5)))


def test_the_slowest_rank_counts() -> None:
    found = measured()
    assert found.per_host == 2
    assert found.products["fp32"] == ((1024, 0.02), (2048, 0.025))
    assert found.memory == 8
    # Bus bandwidth: 2·(n−1)/n of the bytes, over 2 and over 4 ranks.
    assert found.link == pytest.approx(SIZE / 0.1 / 1e9)
    assert found.network == pytest.approx(1.5 * SIZE / 0.5 / 1e9)


def test_a_rank_that_failed_or_differs_is_named() -> None:
    failed = {"failed": "import", "error": "No module named 'torch'", "rank": 1}
    with pytest.raises(PrepareError, match="b: measuring its speed: No module named 'torch'"):
        probe(evidence(report(0), failed))
    with pytest.raises(PrepareError, match=r"b: .*it has A40, and a has cpu"):
        probe(evidence(report(0), report(1, device="A40")))
    silent = {name: value for name, value in report(1).items() if name != "compute"}
    with pytest.raises(PrepareError, match="b: measuring its speed: it reports no measurement"):
        probe(evidence(report(0), silent))
    with pytest.raises(PrepareError, match="a: measuring its speed: it reports no measurement"):
        probe(evidence())
    lost = PrepareError("b", "checking the host", "no answer")
    with pytest.raises(PrepareError, match="no answer"):
        probe(evidence(report(0), report(1), failures=(lost,)))


def test_hosts_with_different_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(PrepareError, match=r"b: .*it has 2 ranks, and a has 1"):
        probe(evidence(*map(report, range(3))))


def test_ranks_without_a_common_product_are_refused() -> None:
    other = report(1)
    other["compute"]["precision"] = {"float32": ((512, 0.1),)}
    with pytest.raises(PrepareError, match="no matrix products of the same sizes"):
        probe(evidence(report(0), other))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(TEXT)
    return path


def test_cpus_are_planned_with_what_they_compute(file: Path) -> None:
    found = measured()
    request = PlanRequest(file=file, model_size="20M", seq_len=256, probe=True)
    question = pose(request, probe=found)
    cluster = question.cluster
    assert (cluster.gpu.name, cluster.gpus, cluster.gpus_per_host) == ("cpu", 4, 2)
    # 16 bits are slower here, so they are no choice.
    assert (question.precision, cluster.gpu.flops) == ("fp32", {"fp32": 0.025})
    best = question.answer().best
    # All arithmetic at the measured peak is a lower limit of the step.
    least = 6 * question.shape.parameters * question.global_batch * 256 / 4 / 0.025e12
    assert least < best.time.total < 20 * least


def test_only_the_runtime_trains_on_cpus(file: Path) -> None:
    request = PlanRequest(file=file, model_size="500M", seq_len=256, probe=True)
    answer = pose(request, probe=measured()).answer()
    assert not answer.question.others
    # 16 bits exist, but are slower.
    assert answer.notes == ("bf16 is not faster on these CPUs: planned for fp32",)
    # What does not fit does not make the plan one for Megatron-LM.
    large = pose(replace(request, fixed={"micro_batch": 64}), probe=measured()).answer()
    assert not large.fits and large.best.layout.backend == "runtime"
    for wrong, text in (
        ({"backend": "megatron"}, "the backend megatron does not support CPUs"),
        ({"lora_rank": 8}, "no backend supports LoRA on CPUs"),
        ({"lora_rank": 8, "fixed": {"tensor": 2}}, "no backend supports LoRA on CPUs"),
        ({"fixed": {"offload": True}}, "`offload` moves nothing on cpu"),
        ({"fixed": {"tensor": 3}}, "`tensor=3` does not divide 4 processes"),
    ):
        with pytest.raises(UsageError, match=text):
            pose(replace(request, **wrong), probe=measured()).answer()


def test_a_plan_for_cpus_speaks_of_processes(file: Path) -> None:
    request = PlanRequest(file=file, model_size="20M", seq_len=256, probe=True)
    answer = pose(request, probe=measured()).answer()
    text = as_text(answer, Paper(100, color=False, unicode=False), count=8)
    assert re.search(r"0\.0\d+ model TFLOP/s\s+per process\.\n", text)
    assert "Copy the model to 4 processes" in text
    # The speed of the network is known from few bytes, and that of products is the peak itself.
    assert re.search(r"hosts of 2, [\d.]{1,5} Gb/s between hosts", text)
    assert "MFU" not in text
    large = pose(replace(request, model_size="1B"), probe=measured()).answer()
    text += as_text(large, Paper(100, color=False, unicode=False), count=8)
    assert "the textbook answer" in " ".join(text.split())
    trained = pose(replace(request, tokens="1B"), probe=measured()).answer()
    text += as_text(trained, Paper(100, color=False, unicode=False), count=8)
    assert re.search(r"tokens take [\d.]+ days on 2 hosts:", " ".join(text.split()))
    assert " host-hours" in text
    text += page(trained, count=8)
    assert "Memory of the fullest process" in text
    assert not re.search(r"\bGPUs?\b", text)
    # They have neither a CUDA context nor NCCL's buffers.
    assert (answer.best.memory.context, answer.best.memory.communication) == (0, 0)


def test_the_stored_table_plans_for_the_same_cpus(file: Path) -> None:
    gpu = measured().as_gpu()
    table = json.dumps(measured().hardware(gpu))
    assert hardware().extended(table, "cpu-x2-hardware.json").gpu("cpu") == gpu


def test_gpus_are_compared_with_the_catalogue() -> None:
    h100 = hardware().gpu("h100-80gb")
    rows = tuple((size, 700.0) for size in (4096, 8192))
    found = replace(
        measured(), device="NVIDIA H100 80GB HBM3", products={"bf16": rows}, copy=2680.0
    )
    shown = {one.what: one for one in found.measurements(h100, 400.0)}
    assert shown["matrix products in bf16"].catalogue == 989
    assert shown["memory bandwidth"].catalogue == 3350
    table = found.calibration(h100, of_family("hopper"))
    assert table["constants"]["stream"] == pytest.approx(0.8)
    assert table["gemm"][0] == {"m": 4096, "k": 4096, "n": 4096, "tflops": 700.0}


def test_a_gpu_with_tf32_is_measured_in_tf32() -> None:
    reports = [report(rank, device="A100", tf32=[[8192, 130.0]]) for rank in range(2)]
    assert probe(evidence(*reports)).products["tf32"] == ((8192, 130.0),)


def test_a_gpu_without_bf16_is_measured_in_fp16() -> None:
    v100 = hardware().gpu("v100-32gb")
    reports = [report(rank, device="Tesla V100-SXM2-32GB") for rank in range(2)]
    for one in reports:
        one["compute"]["precision"] = {"float16": ((8192, 100.0),), "float32": ((8192, 14.0),)}
        one["compute"]["attention"] = 25.0
    table = probe(evidence(*reports)).calibration(v100, of_family("volta"))
    assert table["gemm"] == [{"m": 8192, "k": 8192, "n": 8192, "tflops": 100.0}]
    # The share of the 0.87 of 125 TFLOP/s that a V100 sustains, with a kernel that has half of
    # FlashAttention's speed.
    assert table["constants"]["attention"] == pytest.approx(25 / (125 * 0.87) / 0.5)


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        (TEXT, {"file": None}, "no file names them"),
        (TEXT, {"calibrate": Path("a.json")}, "keep one|both measurements"),
        (TEXT.replace("torch", "tensorflow"), {}, "measures with torch"),
        (
            "cluster: {slurm: {}, nodes: 2, gpus: 8}\njob: {framework: torch, script: a.py}\n",
            {},
            "needs hosts by name",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(
    file: Path, text: str, change: dict[str, Any], message: str
) -> None:
    file.write_text(text)
    request = PlanRequest(file=file, model_size="7B", probe=True)
    with pytest.raises(UsageError, match=message):
        api.plan(replace(request, **change), strategies=True)
