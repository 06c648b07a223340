"""A launch that continues in the background, seen from the foreground."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LAUNCH = """
import os, signal, sys
from pathlib import Path
from dtrain.diagnostics import DtrainError
from dtrain.engines.detachment import Detachment

detachment = Detachment()
try:
    if detachment.in_background:
        {background}
    print(int(detachment.wait()))
except DtrainError as error:
    print(type(error).__name__, error.message, error.hint, sep="; ", flush=True)
    os._exit(error.exit_code)
"""


def output_of(background: str) -> str:
    command = [sys.executable, "-c", LAUNCH.format(background=background)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def test_a_killed_launcher_is_reported() -> None:
    said = output_of("os.kill(os.getpid(), signal.SIGKILL)")
    assert said.startswith("LauncherKilledError; a signal (Killed) ended the launcher")
    assert "`dtrain ps`" in said


def test_a_log_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    said = output_of(f"detachment.leave_terminal('run', Path({str(tmp_path / 'removed')!r}))")
    first, second = said.splitlines()
    assert first.startswith("StorageError; this machine: ")
    assert str(tmp_path / "removed/launcher.log") in first
    assert second == "3"
