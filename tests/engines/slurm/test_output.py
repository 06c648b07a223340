"""The output of a job's processes, as it arrives."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain.engines.slurm.output import JobOutput
from dtrain.launchplan.build import build
from dtrain.messages.agent import StreamFound
from dtrain.messages.decode import ProtocolError
from dtrain.node.agent.worker_files import open_regular
from dtrain.node.slurm.outputs import Outputs
from dtrain.node.slurm.reports import SlurmWorkerReports
from dtrain.runs.folder import RunFolder
from dtrain.spec.load import parse

FILE = "name: t\ncluster: {slurm: {}, nodes: 2, gpus: 2}\njob: {framework: torch, script: t.py}\n"


def test_output_names_the_hosts_of_a_job_that_ended_at_once(tmp_path: Path) -> None:
    output = JobOutput(RunFolder(tmp_path), build(parse(FILE, "t.yaml")))
    output.add("b", StreamFound(1, "worker-2.err"))
    assert output.hosts() == ()
    output.add("a", StreamFound(2, "worker-1.out"))
    assert output.hosts() == ("a", "b")


@pytest.mark.parametrize(
    ("number", "name"), [(2, "worker-9.out"), (2, "../worker-1.out"), (1, "worker-1.out")]
)
def test_a_stream_that_the_job_cannot_have_is_refused(
    tmp_path: Path, number: int, name: str
) -> None:
    output = JobOutput(RunFolder(tmp_path), build(parse(FILE, "t.yaml")))
    output.add("a", StreamFound(1, "worker-0.out"))
    with pytest.raises(ProtocolError, match="unexpected"):
        output.add("a", StreamFound(number, name))


@pytest.mark.parametrize("last", [False, True], ids=["runs", "over"])
@pytest.mark.parametrize("attached", [False, True])
def test_a_truncated_file_is_reported_once(tmp_path: Path, attached: bool, last: bool) -> None:
    said: list[dict[str, Any]] = []
    channel: Any = SimpleNamespace(
        report=lambda kind, **body: said.append({"type": kind, **body}),
        send_data=lambda number, offset, data: None,
    )
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "worker-0.out"
    file.write_text("" if attached else "a line\n")
    offsets = {"a": {"worker-0.out": 7}} if attached else {}
    outputs = Outputs(bytes(tmp_path), offsets, {"worker": 1}, {}, channel)
    assert outputs.send(last=False) == (0 if attached else 7)
    file.write_bytes(b"")
    assert not outputs.send(last=last) and not outputs.send(last=last)
    text = "worker-0.out was truncated: its output is missing until it again has 7 bytes"
    assert said[1:] == [{"type": "notice", "host": "a", "text": text}]


def test_a_truncated_file_of_a_rank_is_reported_after_attach(tmp_path: Path) -> None:
    """Of the newest attempt of torchrun: what is stored of older ones is not known apart."""
    said: list[str] = []
    channel: Any = SimpleNamespace(
        report=lambda kind, **body: said.append(body.get("text", "")),
        send_data=lambda number, offset, data: None,
    )
    for run in ("1", "2"):
        place = tmp_path / "a" / "torchrun-0.ranks" / run / "attempt_0" / "0"
        place.mkdir(parents=True)
        (place / "stdout.log").write_text("line\n")
        os.utime(place.parent, (int(run), int(run)))
    offsets = {"a": {"rank-0.out": 12}}
    outputs = Outputs(bytes(tmp_path), offsets, {}, {"torchrun-0": (0, 1)}, channel)
    outputs.send(last=True)
    text = "rank-0.out was truncated: its output is missing until it again has 7 bytes"
    assert [one for one in said if one] == [text]


def test_a_truncated_file_is_not_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be thousands of them."""
    opened: list[bytes] = []

    def counted(path: bytes) -> int:
        opened.append(path)
        return open_regular(path)

    monkeypatch.setattr("dtrain.node.slurm.outputs.open_regular", counted)
    channel: Any = SimpleNamespace(
        report=lambda kind, **body: None, send_data=lambda number, offset, data: None
    )
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "worker-0.out"
    file.write_text("a line\n")
    outputs = Outputs(bytes(tmp_path), {}, {"worker": 1}, {}, channel)
    outputs.send(last=False)
    file.write_bytes(b"")
    for _ in range(3):
        outputs.send(last=False)
    assert len(opened) == 2
    file.write_text("a line\nand another\n")
    assert outputs.send(last=False)


def test_a_host_s_folder_is_listed_once_for_its_output_and_its_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be in a slow shared folder, as those of a hundred other hosts."""
    place = tmp_path / "a"
    place.mkdir()
    (place / "worker-0.out").write_text("a line\n")
    (place / "rank-0.progress").write_text('{"event": "progress"}\n')
    (place / "0.ended").touch()
    said: list[str] = []
    channel: Any = SimpleNamespace(
        report=lambda kind, **body: said.append(kind), send_data=lambda *data: None
    )
    listed: list[str] = []
    listdir = os.listdir

    def counted(path: bytes) -> list[bytes]:
        listed.append(os.path.basename(os.fsdecode(path)))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", counted)
    outputs = Outputs(bytes(tmp_path), {}, {"worker": 1}, {}, channel)
    reports = SlurmWorkerReports(bytes(tmp_path), False, channel)
    outputs.send(last=False)
    for _ in range(2):
        reports.send(outputs.names, last=False)
    assert said == ["stream", "progress", "ended"]
    assert listed.count("a") == 1
