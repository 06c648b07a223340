"""The output of a job's processes, as it arrives."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain.engines.slurm.output import JobOutput
from dtrain.launchplan.build import build
from dtrain.messages.agent import StreamFound
from dtrain.node.slurm.outputs import Outputs
from dtrain.runs.folder import RunFolder
from dtrain.spec.load import parse

FILE = "name: t\ncluster: {slurm: {}, nodes: 2, gpus: 2}\njob: {framework: torch, script: t.py}\n"


def test_output_names_the_hosts_of_a_job_that_ended_at_once(tmp_path: Path) -> None:
    output = JobOutput(RunFolder(tmp_path), build(parse(FILE, "t.yaml")))
    output.add("b", StreamFound(1, "worker-2.err"))
    assert output.hosts() == ()
    output.add("a", StreamFound(2, "worker-1.out"))
    assert output.hosts() == ("a", "b")


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
    assert outputs.send(last=False) is not attached
    file.write_bytes(b"")
    assert not outputs.send(last=last) and not outputs.send(last=last)
    text = "worker-0.out was truncated: its output is missing until it again has 7 bytes"
    assert said[1:] == [{"type": "notice", "host": "a", "text": text}]
