"""Each attempt of a run, rebuilt from its record."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.diagnostics import UsageError
from dtrain.runs.folder import RunFolder
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.runs.restart import Retry
from dtrain.runtime.layout_rules import MisfitError

FILE = """
cluster: {hosts: [a, b, c, d], spares: [s], gpus: 2}
job:
  framework: torch
  strategy: fsdp
  script: train.py
  training: {global_batch: 24}
  restart: {max: 9}
  elastic: {min_hosts: 2}
"""

CLAIM = """
import sys
from pathlib import Path
from dtrain.runs.folder import RunFolder
claim = RunFolder(Path(sys.argv[1])).claim()
print("claimed", flush=True)
sys.stdin.read()
"""


def hosts(record: Record) -> list[str]:
    return [part.host.name for part in record.plan.hosts]


def test_a_crash_of_the_machine_does_not_bring_an_old_record_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text("old")
    synced: list[tuple[bool, bool]] = []

    def fsync(file: int) -> None:
        folder = stat.S_ISDIR(os.fstat(file).st_mode)
        synced.append((folder, (tmp_path / "run.json").read_text() != "old"))

    monkeypatch.setattr(os, "fsync", fsync)
    Record("run", Request("cluster.yaml", "/", FILE), 29500, "python3", 0.0).save(tmp_path)
    assert synced == [(False, False), (True, True)]


def test_a_spare_first_and_then_fewer(tmp_path: Path) -> None:
    file = FILE.replace("hosts: [a, b, c, d]", "hosts: [a]")
    request = Request("cluster.yaml", "/", file, settings=("cluster.hosts=[a, b, c, d]",))
    record = Record("run", request, 29500, "python3", 0.0)
    second = record.after(Retry(1.0, {"b": "s"}))
    third = second.after(Retry(1.0, {}, ("s",)))
    fourth = third.after(Retry(1.0, {}, ("a",)))
    assert [hosts(one) for one in (record, second, third, fourth)] == [
        ["a", "b", "c", "d"],
        ["a", "s", "c", "d"],
        ["a", "c", "d"],
        ["c", "d"],
    ]
    assert third.dropped == {"s": 3}
    assert third.spec().cluster.spares == ()
    assert fourth.plan.world_size == 4
    (first, _) = fourth.plan.hosts
    environment = {**first.environment, **first.processes[0].environment}
    assert (environment["MASTER_ADDR"], environment["WORLD_SIZE"]) == ("c", "4")
    assert '"data": 4' in environment["DTRAIN_LAYOUT"]
    fourth.save(tmp_path)
    loaded = Record.load(tmp_path)
    assert loaded == fourth
    assert hosts(replace(loaded, attempt=3)) == ["a", "c", "d"]


def test_a_record_of_an_earlier_version_keeps_its_leftovers(tmp_path: Path) -> None:
    request = Request("cluster.yaml", "/", FILE)
    record = Record("run", request, 29500, "python3", 0.0, leftovers=(("a", 1),))
    record.save(tmp_path)
    path = tmp_path / "run.json"
    path.write_text(path.read_text().replace('"leftovers"', '"stray"'))
    assert Record.load(tmp_path) == record


def test_a_faulty_host_is_kept_if_the_layout_needs_it() -> None:
    layout = "layout: {tensor: 2, pipeline: 2, data: 2}"
    file = FILE.replace("fsdp", "3d").replace("job:", f"job:\n  {layout}")
    record = Record("run", Request("cluster.yaml", "/", file), 29500, "python3", 0.0)
    again = Retry(1.0, {}, ("a", "b"))
    assert record.fitting(again, {"a"}) == again
    record = record.after(again)
    # One host is half a pipeline.
    last = Retry(1.0, {}, ("c",))
    assert record.fitting(last, ()) == Retry(1.0)
    with pytest.raises(MisfitError):
        record.fitting(last, {"c"})


def test_a_run_whose_record_was_removed_names_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = RunFolder.create("run-1")
    with subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"claimed\n"
        with pytest.raises(UsageError, match="not found") as found:
            Record.load(folder.path)
        assert f"`kill {launcher.pid}` stops the job" in found.value.hint
        launcher.communicate()
    claim = folder.claim()  # as `dtrain stop` does
    assert claim is not None
    with pytest.raises(UsageError, match="not found") as found:
        Record.load(folder.path)
    assert found.value.hint == ""
    claim.close()
