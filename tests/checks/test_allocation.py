"""What an engine gives a job on a machine."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain.checks import Evidence, HostFacts, Severity
from dtrain.checks.judgement import judge
from dtrain.launchplan.build import build
from dtrain.spec.load import parse

FILE = """
cluster: {slurm: {}, nodes: 1, gpus: 2}
job: {framework: none, script: t.py}
"""


@pytest.mark.parametrize(
    ("facts", "severity", "seen"),
    [
        ({"granted": {"count": 2, "devices": ("4", "5")}}, None, ""),
        ({"granted": {"count": 1, "devices": ("4",)}}, Severity.ERROR, "the job gets 1 GPU there"),
        (
            {"granted": {"count": 2, "devices": ()}},
            Severity.WARNING,
            "CUDA_VISIBLE_DEVICES is not set, so the job may use GPUs of other jobs",
        ),
        (
            {"granted": {"count": 2, "devices": ("4",)}},
            Severity.ERROR,
            "CUDA_VISIBLE_DEVICES names 1 GPU",
        ),
        ({"shared": {"path": "/data/run", "missing": ""}}, None, ""),
        (
            {"shared": {"path": "/data/run", "missing": "no such file"}},
            Severity.ERROR,
            "a file that the login node has written to /data/run is not there: no such file",
        ),
        (
            {"shared": {"path": "/data/run", "missing": "", "not_writable": "read-only"}},
            Severity.ERROR,
            "cannot write to /data/run: read-only",
        ),
    ],
)
def test_what_a_machine_gives_the_job(
    facts: dict[str, Any], severity: Severity | None, seen: str
) -> None:
    plan = build(parse(FILE, "job.yaml"))
    found = judge(Evidence(plan, (HostFacts(plan.hosts[0], facts),)))
    assert [(one.severity, one.seen) for one in found] == ([(severity, seen)] if severity else [])
