"""`dtrain plan FILE --trials N`: real launches on this machine."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

import dtrain
from dtrain import trials
from dtrain.parallelism.answer.document import document
from dtrain_cli.output import stdout_paper
from dtrain_cli.views import layouts
from support.launching import Scene
from support.limits import until

CPU = {
    "name": "cpu", "memory": 16, "bandwidth": 10, "flops": {"fp32": 0.05}, "link": 2,
    "source": "a guess",
}  # fmt: skip


def request(scene: Scene, file: Path, **changed: Any) -> dtrain.PlanRequest:
    hardware = scene.folder / "hardware.json"
    hardware.write_text(json.dumps({"gpus": [CPU]}))
    asked: dict[str, Any] = {
        "sizes": {"layers": 4, "hidden": 64, "heads": 4}, "vocab": 256, "seq_len": 64,
        "global_batch": 8, "precision": "fp32", "hardware": hardware, "gpu": "cpu", "gpus": 2,
        "gpus_per_host": 1, "network_gbps": 10, "trials": 2, **changed,
    }  # fmt: skip
    return dtrain.PlanRequest(file=file, **asked)


def shown(answer: dtrain.Answer) -> str:
    return " ".join(layouts.as_text(answer, stdout_paper(), count=4).split())


@pytest.mark.torch
def test_the_best_layouts_are_trained_and_ranked_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "SECONDS", 0.05)
    file = scene.cluster_file("train.py", hosts=2, slots=1, env={"OMP_NUM_THREADS": "1"})
    said: list[str] = []
    answer = dtrain.plan(request(scene, file), on_notice=said.append)
    assert [line.partition(":")[0] for line in said] == ["trial 1 of 2", "trial 2 of 2"]
    written = document(answer, 4)
    for one in written["trials"]:
        assert one["failure"] is None, one
        # A model of four layers is trained whole, so its step is measured, not estimated.
        last = one["cases"][-1]
        assert (last["layers"], last["micro_batches"]) == (4, one["grad_accumulation"])
        assert one["corrected_s"] == pytest.approx(last["measured_s"], rel=1e-4)
        assert one["corrected_s"] == pytest.approx(one["slowdown"] * one["predicted_s"], rel=1e-4)
        assert last["allocated_gib"] is None
        assert last["resident_gib"] > 0
    fastest = min(one["corrected_s"] for one in written["trials"])
    assert answer.best.time.total == pytest.approx(fastest, rel=1e-4)
    assert written["layouts"][0]["time_s"]["total"] == pytest.approx(fastest, rel=1e-4)
    assert "Trials layout layers batches predicted measured estimate corrected" in shown(answer)
    assert scene.leftovers() == []


BROKEN = {"memory": "CUDA out of memory. Tried to allocate 20.00 GiB.", "bug": "what a day"}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_layout_that_does_not_train(kind: str, scene: Scene) -> None:
    package = scene.folder / "broken" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"raise RuntimeError({BROKEN[kind]!r})\n")
    env = {"PYTHONPATH": str(package.parent)}
    file = scene.cluster_file("train.py", hosts=2, slots=1, env=env)
    answer = dtrain.plan(request(scene, file, trials=1))
    (trial,) = answer.trials
    assert not trial.ok
    assert trial.out_of_memory == (kind == "memory")
    assert BROKEN[kind] in trial.failure
    same = answer.best.layout == trial.planned.layout
    assert same == (kind == "bug")
    text = shown(answer)
    assert ("is left out: it ran out of memory" if kind == "memory" else "did not train") in text
    assert f"(dtrain logs {trial.run})" in text
    assert scene.leftovers() == []


def test_ctrl_c_ends_the_trial_and_the_plan(scene: Scene) -> None:
    package = scene.folder / "slow" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import time\ntime.sleep(3600)\n")
    env = {"PYTHONPATH": str(package.parent)}
    file = scene.cluster_file("train.py", hosts=2, slots=1, env=env)
    asked = request(scene, file)
    options = [
        "--layers", "4", "--hidden", "64", "--heads", "4", "--vocab", "256", "--seq-len", "64",
        "--global-batch", "8", "--precision", "fp32", "--hardware", str(asked.hardware),
        "--gpu", "cpu", "--gpus", "2", "--gpus-per-host", "1", "--network-gbps", "10",
        "--trials", "1",
    ]  # fmt: skip
    command = scene.command("plan", str(file), *options)
    # The check before it starts a Python of the job, too.
    until(
        lambda: [one for one in scene.leftovers() if "dtrain-check" not in one],
        "a worker of the trial",
    )
    command.send(signal.SIGINT)
    ended = command.wait()
    assert ended.code == 130, ended
    assert scene.leftovers() == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"trials": 17}, "`trials=17` is not a number of layouts"),
        ({"trials": -1}, "`trials=-1` is not a number of layouts"),
        ({"gpus": 4, "gpus_per_host": 2}, "which run 2 ranks, but the plan is for 4 GPUs"),
        ({"framework": "tensorflow"}, "trains with torch, but `framework` is tensorflow"),
        ({"backend": "megatron"}, "this plan is for `backend='megatron'`"),
        ({"lora_rank": 4, "backend": "megatron"}, "no trials of this plan"),
    ],
)
def test_refused(changed: dict[str, Any], message: str, scene: Scene) -> None:
    file = scene.cluster_file("train.py", hosts=2, slots=1)
    with pytest.raises(dtrain.UsageError, match=message):
        dtrain.plan(request(scene, file, **changed))


def test_errors_of_the_trials_file_come_before_a_probe(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = scene.cluster_file("train.py", hosts=2, slots=1)
    monkeypatch.setattr(trials, "KEPT", (*trials.KEPT, "script"))
    with pytest.raises(dtrain.SpecError, match="module"):
        trials.trainable(request(scene, file))


def test_only_where_a_launch_by_name_is_possible(scene: Scene) -> None:
    with pytest.raises(dtrain.UsageError, match="no file names them"):
        dtrain.plan(dtrain.PlanRequest(model_size="7B", trials=3))
    base = {"cluster": {"hosts": ["a"], "gpus": 1}, "job": {"framework": "torch", "script": "t.py"}}
    image = {**base, "job": {**base["job"], "container": {"image": "torch:1"}}}
    jax = {**base, "job": {"framework": "jax", "script": "t.py"}}
    slurm = {**base, "cluster": {"nodes": 2, "slurm": {"partition": "gpu"}, "gpus": 1}}
    for document_, message in (
        (image, "does not train in containers"),
        (jax, "job.framework is jax"),
        (slurm, "an engine chooses them"),
    ):
        asked = dtrain.PlanRequest(scene.write(document_), model_size="7B", gpu="a40", trials=1)
        with pytest.raises(dtrain.UsageError, match=message):
            dtrain.plan(asked)
