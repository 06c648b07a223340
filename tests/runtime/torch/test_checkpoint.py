"""A killed save loses only itself, and a run resumes from the newest complete checkpoint."""

from __future__ import annotations

import json
import pickle
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from dtrain.runtime.torch.checkpoint import _place_for, save
from dtrain.runtime.torch.plain_data import PlainReader
from runtime.torch.ranks import HERE, ROOT, finish, run, start
from support.cluster import job
from support.warm import Process

pytestmark = pytest.mark.torch

RECIPE = ROOT / "scripts" / "recipes" / "train_gpt.py"
SMALL = ["--width", "32", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--context", "32",
         "--batch", "8", "--data", ROOT / "scripts", "--device", "cpu", "--every", "1"]  # fmt: skip


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_save_keeps_at_least_itself(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0"):
        save(tmp_path, 1, None, None, keep=0)  # type: ignore[arg-type]
    assert names(tmp_path) == []


def test_metadata_that_python_3_11_2_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name))
    )
    metadata = Metadata({"w": TensorStorageMetadata(TensorProperties(), torch.Size([1]), [])})
    stored = tmp_path / ".metadata"
    stored.write_bytes(pickle.dumps(metadata))
    found = PlainReader(tmp_path).read_metadata()
    assert found.state_dict_metadata == metadata.state_dict_metadata

    class Other:
        def __reduce__(self) -> tuple[object, tuple[object, str]]:
            return getattr, (Metadata, "__init__")

    stored.write_bytes(pickle.dumps(Other()))
    with pytest.raises(KeyError, match="__init__"):
        PlainReader(tmp_path).read_metadata()


def test_a_kill_in_the_middle_of_a_save_keeps_the_one_before(tmp_path: Path) -> None:
    saved = tmp_path / "plain"
    ranks = start(2, HERE / "killed_save_job.py", saved)
    finish(ranks)
    assert ranks[1].returncode == -signal.SIGKILL
    assert ranks[0].returncode != 0
    assert names(saved) == ["step-00000001", "step-00000002.partial"]
    assert list((saved / "step-00000002.partial").glob("__1_*.distcp"))

    # Alone and in another layout, a run finds step 1, and its save of step 2 replaces the remains.
    cases, report = tmp_path / "cases.json", tmp_path / "report.json"
    cases.write_text(json.dumps({"alone": {"resume": True, "stop": 2}}))
    run(1, HERE / "layouts_job.py", cases, report, saved.parent)
    found = json.loads(report.read_text())["alone"]
    assert found["start"] == 1
    assert found["weights"] < 1e-4
    assert names(saved) == ["step-00000001", "step-00000002"]


def test_damaged_and_planted_checkpoints_are_passed_over(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    (saved / "step-00000009.partial").mkdir(parents=True)  # of a killed attempt
    said = run(2, HERE / "unreadable_checkpoint_job.py", saved, tmp_path)
    for rank in range(2):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert report["kept"] == report["kept then"] == ["step-00000002", "step-00000003"]
        assert report["restored"] == report["found"]["steps"] == 2
        assert report["found"] == report["second"]
        assert report["samples"] == 16
        # The error of the newest, after both were tried.
        assert report["refused"] == [1]
    warned = [line for line in said[0].splitlines() if "warning" in line]
    found = [Path(line.split()[1]).name for line in warned]
    assert [int(name.removeprefix("step-")) for name in found] == [5, 4, 3, 3, 2]
    # The pickles of both were planted.
    assert ".steps is not plain data" in warned[0]
    assert "mkdir does not belong in a checkpoint" in warned[1]
    assert not (tmp_path / "ran").exists()
    assert "warning" not in said[1]


@pytest.mark.parametrize(
    ("key", "group", "device"),
    [
        ("step", {}, "cpu"),
        ("step", {"fused": True}, "meta"),
        ("step", {"capturable": True}, "meta"),
        ("row_variance", {}, "meta"),
        ("exp_avg", {}, "meta"),
    ],
)
def test_where_an_optimizer_keeps_its_tensors(
    key: str, group: dict[str, bool], device: str
) -> None:
    sizes = {"step": [], "row_variance": [4, 1], "exp_avg": [4, 3]}
    entry = TensorStorageMetadata(
        TensorProperties(torch.float32), torch.Size(sizes[key]), chunks=[]
    )
    parameter = torch.empty(4, 3, device="meta")
    place = _place_for(key, entry, parameter, group)
    assert place is not None
    assert place.device.type == device


def until(rank: Process, text: str) -> None:
    """Read what ``rank`` prints up to a line with ``text``."""
    said = ""
    for line in rank.stdout:
        said += line
        if text in line:
            return
    raise AssertionError(f"ended before it said {text!r}:\n{said}")


def test_stopped_and_killed_runs_follow_an_undisturbed_one(tmp_path: Path) -> None:
    steps = 40
    saved = tmp_path / "saved"
    options = [*SMALL, "--steps", steps, "--checkpoint", saved, "--save-every", "4"]
    run(1, RECIPE, *SMALL, "--steps", steps, "--losses", tmp_path / "whole.json")
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert whole[str(steps)] < whole["1"] - 0.5

    # SIGTERM to one of two ranks: both save where they are, and end well.
    interrupted = [job("interrupted.py"), RECIPE.stem, *options]
    variables = {"DTRAIN_ATTEMPT": "1", "WAIT_AT": "2", "WAIT_RANK": "1"}
    ranks = start(
        2, *interrupted, "--strategy", "tensor", "--losses", tmp_path / "1.json", **variables
    )
    until(ranks[1], "waits")
    ranks[1].send_signal(signal.SIGTERM)
    said = finish(ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], said
    stopped = json.loads((tmp_path / "1.json").read_text())
    last = max(map(int, stopped))
    assert f"SIGTERM: ends after step {last}" in said[0]
    assert last < steps

    # SIGKILL to all, in another layout.
    variables["WAIT_AT"] = str(last + 6)
    ranks = start(2, *interrupted, "--strategy", "fsdp", **variables)
    until(ranks[0], f"resumed after step {last}")
    until(ranks[1], "waits")
    for rank in ranks:
        rank.kill()
    finish(ranks)
    newest = max(int(name.removeprefix("step-")) for name in names(saved) if name[-1].isdigit())
    assert last < newest < steps

    # And in a third to the end.
    [said_1, _] = run(
        2, RECIPE, *options, "--strategy", "pipeline", "--losses", tmp_path / "2.json"
    )
    assert "held-out loss" in said_1
    resumed = json.loads((tmp_path / "2.json").read_text())
    assert min(map(int, resumed)) == newest + 1
    assert max(map(int, resumed)) == steps
    for step, loss in {**stopped, **resumed}.items():
        assert loss == pytest.approx(whole[step], rel=1e-4), step
