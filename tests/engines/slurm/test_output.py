"""The output of a job's processes, as it arrives."""

from __future__ import annotations

from pathlib import Path

from dtrain.engines.slurm.output import JobOutput
from dtrain.launchplan.build import build
from dtrain.messages.agent import StreamFound
from dtrain.runs.folder import RunFolder
from dtrain.spec.load import parse

FILE = "name: t\ncluster: {slurm: {}, nodes: 2, gpus: 2}\njob: {framework: torch, script: t.py}\n"


def test_output_names_the_hosts_of_a_job_that_ended_at_once(tmp_path: Path) -> None:
    output = JobOutput(RunFolder(tmp_path), build(parse(FILE, "t.yaml")))
    output.add("b", StreamFound(1, "worker-2.err"))
    assert output.hosts() == ()
    output.add("a", StreamFound(2, "worker-1.out"))
    assert output.hosts() == ("a", "b")
