"""Threads of links that fail, or that do not start."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dtrain.diagnostics import ExitCode, InternalError
from dtrain.engines.ssh.guarded import fault, run_guarded
from support.limits import HANG
from support.threads import no_free_thread


def test_a_bug_is_reported_with_a_file(tmp_path: Path) -> None:
    reported = threading.Event()
    bugs: list[Exception] = []

    def report(bug: Exception) -> None:
        bugs.append(bug)
        reported.set()

    def work() -> None:
        raise ValueError("a bug")

    run_guarded("guarded", work, report)
    assert reported.wait(HANG)
    assert isinstance(fault(bugs[0], tmp_path), InternalError)
    assert "ValueError: a bug" in (tmp_path / "fault.txt").read_text()


def test_a_machine_without_a_free_thread_is_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bugs: list[Exception] = []
    with no_free_thread(monkeypatch, "guarded"):
        run_guarded("guarded", lambda: None, bugs.append)
    error = fault(bugs[0], tmp_path)
    assert error.exit_code is ExitCode.NODE_FAILED
    assert "ulimit -u" in error.hint
    assert not (tmp_path / "fault.txt").exists()
