"""Stored measurements of `dtrain plan --probe`."""

import json
from pathlib import Path

import pytest

from dtrain.runs.probes import store


def test_a_gpu_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    for copy in (80.0, 90.0):
        path = store("../H100 PCIe/80-x8", {"copy": copy})
        assert path.parent == tmp_path / "probes"
        assert json.loads(path.read_text()) == {"copy": copy}
        assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]
