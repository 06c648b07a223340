"""Which output `dtrain logs` shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.launching import completed
from support.stored import make_run


def test_tail_shows_the_last_lines_of_each_worker_from_all_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    run = make_run().path
    for name, first, second in (
        ("worker-0.out", "a\nb\n", "c\n"),
        ("worker-1.out", "d\n", "e\nf\ng\n"),
        ("worker-1.err", "h\n", ""),
    ):
        (run / "logs/n1" / name).write_text(first)
        (run / "logs-2/n1" / name).write_text(second)
    shown = completed("logs", "run-1", "--tail", "2", environment=os.environ)
    assert [line[-1] for line in shown.stdout.splitlines()] == ["b", "c", "f", "g"]
    assert [line[-1] for line in shown.stderr.splitlines()] == ["h"]
