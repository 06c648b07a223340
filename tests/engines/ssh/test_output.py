"""What has arrived from one host."""

from __future__ import annotations

from pathlib import Path

from dtrain.engines.ssh.output import HostOutput
from dtrain.runs.folder import RunFolder


def test_only_output_counts_as_received(tmp_path: Path) -> None:
    """The journal gets these sizes. Progress of 1,000 ranks would fill it with gigabytes a week."""
    output = HostOutput("a", RunFolder(tmp_path), ranked=True)
    for name in ("events", "telemetry", "rank-0.progress", "worker-0.out"):
        output.note(name, 5)
    assert output.received() == {"worker-0.out": 5}
