"""Training on CPUs teaches the planner a machine of which it knows nothing."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
import yaml

from dtrain import PlanRequest
from dtrain.planning.question import pose
from dtrain.runs import events, journal
from dtrain.runs.calibration import learned
from dtrain.runs.folder import RunFolder
from dtrain.runs.progress import Progress
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.runtime.layout import Layout
from runtime.torch.ranks import run
from support.recipes import RECIPES

pytestmark = pytest.mark.torch
SIZES = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 4, "ffn_hidden": 352}
MODEL = ["--layers", 4, "--width", 128, "--heads", 4, "--kv-heads", 4, "--mlp-width", 352]
STEPS, BATCH, CONTEXT = 8, 8, 128
LAYOUTS = {
    "ddp": Layout(data=2, micro_batch=4),
    "fsdp": Layout(data=2, sharding="full", micro_batch=4),
    "tensor": Layout(tensor=2, micro_batch=8),
}


def trained(strategy: str, folder: Path) -> str:
    """A run that trained on two processes. Its step time, and those of the others, vary with what
    else the machine does."""
    layout = LAYOUTS[strategy]
    options = [*MODEL, "--steps", STEPS, "--batch", BATCH, "--context", CONTEXT, "--warmup", 1]
    data = folder / "text.txt"
    data.write_text("The quick brown fox jumps over the lazy dog.\n" * 1000)
    command = [RECIPES / "train_gpt.py", *options, "--data", data, "--strategy", strategy]
    run(2, *command, DTRAIN_RUN_DIR=str(folder))
    stored = RunFolder.create(strategy)
    file = {
        "cluster": {"hosts": ["node0"], "gpus": 2},
        "job": {
            "framework": "torch",
            "script": "train_gpt.py",
            "training": {"global_batch": BATCH, "seq_len": CONTEXT, "precision": "fp32"},
            "layout": {
                "tensor": layout.tensor,
                "data": layout.data,
                "sharding": layout.sharding,
                "micro_batch": layout.micro_batch,
            },
        },
    }
    request = Request("c.yaml", "/", yaml.safe_dump(file))
    Record(strategy, request, 29500, "python3", time.time()).save(stored.path)
    lines = map(json.loads, (folder / "rank-0.progress").read_text().splitlines())
    reports = [Progress.read("rank-0", line) for line in lines if line["event"] == "progress"]
    assert [reports[0].step, reports[-1].step] == [1, STEPS]
    written = [journal.encode(one.time, events.Progressed(one)) for one in reports]
    stored.journal.write_bytes(b"".join(written))
    stored.journal.chmod(0o600)
    return strategy


def test_two_runs_predict_a_third_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guess is a GPU that is faster by a factor of 10 to 1000: what is learned is far more than
    what the load of this machine changes between two runs."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    for strategy in LAYOUTS:
        (tmp_path / strategy).mkdir()
        trained(strategy, tmp_path / strategy)
    request = PlanRequest(
        sizes=SIZES, vocab=256, gpus=2, gpu="a100-80gb", gpus_per_host=2, seq_len=CONTEXT,
        global_batch=BATCH, precision="fp32",
    )  # fmt: skip
    question = pose(request)
    (error,) = learned(question, ["tensor"]).calibration
    before = question.candidate(LAYOUTS["tensor"]).time.total
    assert before == pytest.approx(error.before_s)
    after = learned(question, ["ddp", "fsdp"]).candidate(LAYOUTS["tensor"]).time.total
    assert abs(math.log(after / error.measured_s)) < 0.6 * abs(math.log(before / error.measured_s))
