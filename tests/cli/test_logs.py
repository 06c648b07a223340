"""Which output `dtrain logs` shows."""

from __future__ import annotations

import json
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
    assert shown.stderr == "[n1 1] h\ndtrain: output of attempt 2\n"
    shown = completed("logs", "run-1", "--json", "--rank", "0", environment=os.environ)
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [(line["attempt"], line["text"]) for line in lines] == [(1, "a"), (1, "b"), (2, "c")]


def test_a_run_without_output_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = make_run()
    for file in folder.path.glob("logs*/*/worker-*"):
        file.write_bytes(b"")

    def stderr(*options: str) -> str:
        return completed("logs", "run-1", *options, environment=os.environ).stderr

    assert stderr() == "dtrain: no worker has written anything\n"
    assert stderr("--json") == ""
    (folder.path / "logs/n1/worker-0.out").write_text("a\n")
    assert stderr() == stderr("--rank", "0") == ""
    assert stderr("--rank", "1") == "dtrain: none of these workers has written anything\n"
    claim = folder.claim()
    assert claim is not None
    try:
        assert "has written anything yet\n" in stderr("--rank", "1")
    finally:
        claim.close()
