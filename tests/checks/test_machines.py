"""Findings for recorded machines of many kinds: golden files next to the recordings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dtrain.checks.judgement import judge
from dtrain_cli.views.findings import as_text
from dtrain_cli.views.paper import Paper
from support.machines import KINDS, MACHINES, recorded_evidence


@pytest.mark.parametrize("kind", KINDS)
def test_findings(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    golden: Callable[[str, Path], None],
) -> None:
    evidence = recorded_evidence(kind, tmp_path, monkeypatch)
    text = as_text(evidence, judge(evidence), 1.0, Paper(100, color=False, unicode=True))
    golden(text, MACHINES / kind / "findings.txt")
