"""`--output`: `dtrain launch` accepts the files that `dtrain plan` writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dtrain.planning.question import pose
from dtrain.planning.request import PlanRequest
from support.specs import read

FILE = """\
# Our cluster.
cluster:
  hosts: "gpu[01-{hosts:02}]"   # the new rack
  gpus: {gpus}
  gpu: {gpu}

job:
  framework: torch
  script: train.py      # ours
"""


@pytest.mark.parametrize(
    ("hosts", "gpus", "gpu", "model"),
    [
        (1, 1, "h100-80gb", ("--model-size", "1.3B")),
        (3, 4, "h200", ("--model-size", "13B", "--seq-len", "16384")),
        (8, 8, "a100-80gb", ("--model", "mixtral-8x7b")),
        (3, 4, "h200", ("--model", "llama-3-70b", "--precision", "fp8")),
        (16, 8, "h100", ("--model-size", "100B")),
        (1, 8, "a100-80gb", ("--model-size", "100B")),
        (1, 8, "a100-80gb", ("--model", "llama-3-70b", "--precision", "fp8")),
    ],
)
def test_launch_accepts_the_file_of_a_plan(
    dtrain: Any, tmp_path: Path, hosts: int, gpus: int, gpu: str, model: tuple[str, ...]
) -> None:
    """`test_backends.py` does so for many models, without the command."""
    file = tmp_path / "cluster.yaml"
    before = FILE.format(hosts=hosts, gpus=gpus, gpu=gpu)
    file.write_text(before)
    done = dtrain("plan", *model, "cluster.yaml", "--output", "cluster.yaml")
    if done.returncode in (1, 2):
        # Some models do not fit on some clusters, and some GPUs have no fp8.
        assert re.search("no layout fits|does not support fp8", done.stdout + done.stderr)
        assert file.read_text() == before
        return
    assert done.returncode == 0, done.stderr
    assert "the script must apply the layout (`dtrain help torch`)" in " ".join(done.stdout.split())
    for line in before.splitlines():
        assert line in file.read_text()
    launched = dtrain("launch", "cluster.yaml", "--dry-run")
    assert launched.returncode == 0, launched.stderr
    job = read(file).job
    layout, training = job.layout, job.training
    assert layout is not None
    assert training is not None
    assert layout.tensor * layout.pipeline * layout.context * layout.data == hosts * gpus
    assert training.global_batch == (layout.data * layout.micro_batch * layout.grad_accumulation)


@pytest.mark.parametrize("existing", [True, False])
def test_the_file_holds_what_the_plan_expects(dtrain: Any, tmp_path: Path, existing: bool) -> None:
    file = tmp_path / "c.yaml"
    if existing:
        file.write_text(FILE.format(hosts=1, gpus=8, gpu="h100"))
    where = ["c.yaml"] if existing else ["--gpus", "8", "--gpu", "h100"]
    done = dtrain("plan", "--model-size", "7B", *where, "--output", "c.yaml", "--json")
    best = json.loads(done.stdout)["layouts"][0]
    job = read(file).job
    expected = job.expected
    assert expected is not None and expected.step_time is not None and expected.compute_time
    assert expected.step_time == pytest.approx(best["time_s"]["total"], rel=1e-3)
    assert expected.compute_time <= expected.step_time
    assert expected.memory_gib == pytest.approx(best["memory_gib"]["total"], rel=1e-3)
    tokens = job.training.global_batch * job.training.seq_len / expected.step_time  # type: ignore
    assert expected.mfu(tokens, gpus=8) == pytest.approx(best["mfu"], rel=2e-3)


def test_states_of_16_bits_stay_in_the_file_until_a_plan_has_others(
    dtrain: Any, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(FILE.format(hosts=1, gpus=8, gpu="h100"))
    plan = ("plan", "--model", "llama-3-8b", "c.yaml", "--output", "c.yaml")
    # The second plan finds the value in the file.
    for asked, bits in ((("--state-bits", "16"), 16), ((), 16), (("--state-bits", "32"), 32)):
        done = dtrain(*plan, *asked)
        assert done.returncode == 0, done.stderr
        assert read(file).job.training.state_bits == bits  # type: ignore[union-attr]
        assert ('training.dtype = "bfloat16"' in done.stdout) is (bits == 16)


@pytest.mark.parametrize(
    ("key", "model", "note", "setting"),
    [
        (
            "overlap_experts",
            "mixtral-8x7b",
            "exchanges between experts beside the computation need",
            "--overlap-moe-expert-parallel-comm",
        ),
        (
            "cuda_graph",
            "llama-3-8b",
            "a CUDA graph of the whole step needs",
            "--cuda-graph-impl full_iteration",
        ),
    ],
)
def test_what_the_script_turns_on_stays_in_the_file_until_a_plan_has_none(
    dtrain: Any, tmp_path: Path, key: str, model: str, note: str, setting: str
) -> None:
    plan = ("plan", "--model", model, "--backend", "megatron", "--output", "c.yaml")
    option = key.replace("_", "-")
    asked = ("--gpu", "h100", "--gpus", "16", f"--{option}")
    file = tmp_path / "c.yaml"
    for more, on in ((asked, True), (("c.yaml",), True), (("c.yaml", f"--no-{option}"), False)):
        done = dtrain(*plan, *more)
        assert done.returncode == 0, done.stderr
        assert getattr(read(file).job.training, key) is on
        assert (note in " ".join(done.stdout.split())) is on
        # The note of the new file stays.
        assert f"# {setting} and what `dtrain help keys`" in file.read_text()


def test_the_overlap_in_the_file_of_a_model_without_experts(dtrain: Any, tmp_path: Path) -> None:
    asked = ("--model", "mixtral-8x7b", "--gpu", "h100", "--gpus", "16", "--overlap-experts")
    assert dtrain("plan", *asked, "--output", "c.yaml").returncode == 0
    done = dtrain("plan", "c.yaml", "--model", "llama-3-8b")
    assert "c.yaml: job.training.overlap_experts is for models with experts" in done.stderr
    assert "hint: use --no-overlap-experts, or choose" in done.stderr


@pytest.mark.parametrize(
    ("fixed", "strategy"),
    [
        (("--tensor", "8", "--pipeline", "1", "--context", "1"), "tensor"),
        (("--tensor", "1", "--pipeline", "8", "--context", "1"), "pipeline"),
        (("--data", "8", "--sharding", "full"), "fsdp"),
        (("--data", "8", "--sharding", "none"), "ddp"),
        (("--data", "8", "--sharding", "optimizer"), "3d"),
        (("--tensor", "2", "--pipeline", "2", "--data", "2"), "3d"),
    ],
)
def test_the_strategy_matches_the_layout(
    dtrain: Any, tmp_path: Path, fixed: tuple[str, ...], strategy: str
) -> None:
    (tmp_path / "c.yaml").write_text(FILE.format(hosts=1, gpus=8, gpu="h100"))
    # Models below 4B have tied embeddings, which only other backends split into stages.
    size = "7B" if "--pipeline" in fixed else "1B"
    job = ("--model-size", size, "--global-batch", "64")
    done = dtrain("plan", *job, "c.yaml", *fixed, "--output", "c.yaml")
    assert done.returncode == 0, done.stderr
    assert read(tmp_path / "c.yaml").job.strategy == strategy
    assert dtrain("launch", "c.yaml", "--dry-run").returncode == 0


def test_hybrid_sharding_names_its_groups(dtrain: Any, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(FILE.format(hosts=4, gpus=8, gpu="h100"))
    hybrid = ("--tensor", "1", "--pipeline", "1", "--context", "1", "--sharding", "hybrid")
    done = dtrain("plan", "--model-size", "7B", "c.yaml", *hybrid, "--output", "c.yaml")
    assert done.returncode == 0, done.stderr
    job = read(tmp_path / "c.yaml").job
    assert job.strategy == "hsdp"
    assert job.layout is not None
    assert (job.layout.data, job.layout.shard) == (32, 8)
    assert dtrain("launch", "c.yaml", "--dry-run").returncode == 0


def test_a_new_file_has_hosts_to_change(dtrain: Any, tmp_path: Path) -> None:
    done = dtrain("plan", "--model-size", "100B", "--output", "new.yaml")
    assert done.returncode == 0, done.stderr
    assert "new.yaml: a new cluster file" in done.stdout
    launched = dtrain("launch", "new.yaml", "--dry-run")
    assert launched.returncode == 0, launched.stderr
    assert "64 processes on 8 hosts" in launched.stdout


def test_output_to_another_file(dtrain: Any, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(FILE.format(hosts=1, gpus=8, gpu="h100"))
    done = dtrain("plan", "--model-size", "7B", "c.yaml", "--output", "out.yaml")
    assert done.returncode == 0, done.stderr
    assert "# the new rack" in (tmp_path / "out.yaml").read_text()
    assert "layout" not in (tmp_path / "c.yaml").read_text()
    assert dtrain("launch", "out.yaml", "--dry-run").returncode == 0


def test_a_second_plan_replaces_the_first(dtrain: Any, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(FILE.format(hosts=1, gpus=8, gpu="h100"))
    write = ("c.yaml", "--output", "c.yaml")
    assert dtrain("plan", "--model-size", "7B", "--tensor", "1", *write).returncode == 0
    assert read(tmp_path / "c.yaml").job.layout.tensor == 1  # type: ignore[union-attr]
    assert dtrain("plan", "--model-size", "7B", "--tensor", "4", *write).returncode == 0
    assert read(tmp_path / "c.yaml").job.layout.tensor == 4  # type: ignore[union-attr]


def test_a_layout_for_other_hosts_is_not_written(dtrain: Any, tmp_path: Path) -> None:
    text = FILE.format(hosts=4, gpus=8, gpu="h100")
    (tmp_path / "c.yaml").write_text(text)
    done = dtrain("plan", "--model-size", "7B", "c.yaml", "--gpus", "64", "--output", "c.yaml")
    assert done.returncode == 2
    assert (tmp_path / "c.yaml").read_text() == text
    assert "32" in done.stderr


def test_no_file_is_written_if_nothing_fits(dtrain: Any, tmp_path: Path) -> None:
    done = dtrain("plan", "--model-size", "1T", "--gpus", "8", "--output", "new.yaml")
    assert done.returncode == 1
    assert "Written  new.yaml: nothing, because no layout fits" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "asked",
    [
        ("--model-size", "1T", "--gpus", "8"),
        ("--model-size", "1T", "--gpus", "8", "--json"),
        ("--model-size", "100B", "--tensor", "8", "--data", "8", "--sharding", "none"),
        ("--model-size", "1T", "--gpus", "8", "--framework", "tensorflow"),
    ],
)
def test_the_exit_code_says_that_nothing_fits(dtrain: Any, asked: tuple[str, ...]) -> None:
    done = dtrain("plan", *asked)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_page_can_be_written_too(dtrain: Any, tmp_path: Path) -> None:
    done = dtrain("plan", "--model-size", "1B", "--gpus", "8", "--html", "plan.html")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    assert "plan.html" in done.stdout


def test_a_file_without_a_valid_layout(dtrain: Any, tmp_path: Path) -> None:
    """`dtrain plan` fixes a file without a layout, or with a layout for other hosts."""
    for layout in ("", "  layout: {tensor: 64}\n"):
        text = FILE.format(hosts=1, gpus=8, gpu="h100") + "  strategy: 3d\n" + layout
        (tmp_path / "c.yaml").write_text(text)
        refused = dtrain("launch", "c.yaml", "--dry-run")
        assert refused.returncode == 2
        assert "layout" in refused.stderr
        done = dtrain("plan", "--model-size", "1B", "c.yaml", "--output", "c.yaml")
        assert done.returncode == 0, done.stderr
        assert dtrain("launch", "c.yaml", "--dry-run").returncode == 0


def test_a_plan_keeps_what_it_never_chooses(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "name: kept\n"
        "cluster: {hosts: [a], gpus: 8, gpu: h100-80gb}\n"
        "job:\n"
        "  framework: torch\n"
        "  strategy: fsdp\n"
        "  script: train.py\n"
        "  layout: {compile: true, reduce: bf16, offload_activations: true}\n"
    )
    answer = pose(PlanRequest(model="gpt2", file=file)).answer()
    kept = answer.best.layout
    assert (kept.compile, kept.reduce, kept.offload_activations) == (True, "bf16", True)
    assert kept.recompute == "none"
    from_file = "the plan has reduce: bf16, compile: true and offload_activations: true"
    assert answer.notes[-1].startswith(from_file)
    split = pose(PlanRequest(model="opt-1.3b", file=file, fixed={"tensor": 2})).answer()
    assert split.notes[-1].startswith(from_file)
    assert "stay on the GPUs" in split.notes[-1].removeprefix(answer.notes[-1])
    other = pose(PlanRequest(model="gpt2", file=file, backend="megatron")).answer()
    assert not other.best.layout.compile
    assert not any("job.layout" in note for note in other.notes)


@pytest.mark.parametrize("option", ["--output", "--html"])
def test_a_file_that_cannot_be_written_is_refused_before_the_search(
    dtrain: Any, option: str
) -> None:
    done = dtrain("plan", "--model", "unknown", option, "no/file")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no such folder" in done.stderr


def test_a_layout_that_the_file_allows_only_with_settings(dtrain: Any, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(before := FILE.format(hosts=2, gpus=2, gpu="h100"))
    words = ("--model-size", "1B", "cluster.yaml", "--set", "cluster.gpus=4")
    done = dtrain("plan", *words, "--output", "cluster.yaml")
    assert done.returncode == 2
    assert "hint: `--output` does not write the values of --set" in done.stderr
    assert file.read_text() == before


def test_the_output_names_the_settings_that_it_does_not_have(dtrain: Any, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(FILE.format(hosts=2, gpus=2, gpu="h100"))
    settings = ("job.env.TOKEN=hunter2", '"job".layout=null', "job.args=[a]", "job.args=[b]")
    options = [word for setting in settings for word in ("--set", setting)]
    done = dtrain("plan", "--model-size", "1B", "cluster.yaml", *options, "--output", "new.yaml")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "set; not the --set values of job.env.TOKEN, job.args: give them to" in text
    assert "hunter2" not in done.stdout
