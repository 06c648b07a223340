"""If one rank has a reason to act, all ranks act."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.torch.ranks import HERE, run

pytestmark = pytest.mark.torch


def test_ranks_decide_together(tmp_path: Path) -> None:
    run(2, HERE / "together_job.py", tmp_path)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, report in enumerate(reports):
        data = report["data"]
        assert f"from 64 to 65 samples, and {64 + rank} on rank {rank}" in data["length"]
        for name in ("content", "content, read by a worker"):
            assert "64 samples each, but not the same first and last" in data[name]
        assert data["random"] == ""
        for layout in ("ddp", "pipeline"):
            assert report[layout] == {"taken": [False, True], "scales": [0.5, 0.5], "kept": True}
    assert reports[0]["frozen"] == reports[1]["frozen"] > 0
