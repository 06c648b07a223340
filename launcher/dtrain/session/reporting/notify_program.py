"""Runs the program of a notification."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dtrain.failures.cause import signal_name

LIMIT = 10.0
"""Seconds of one notification."""
MARGIN = 1.0
"""Seconds before the limit at which a program is killed, or an answer is no longer awaited."""


class NotifyError(Exception):
    """Why a notification failed. The message contains no URL."""


def run(command: Sequence[str], folder: Path, body: bytes, limit: float = LIMIT - MARGIN) -> None:
    """Run a program in ``folder`` with ``body`` on stdin, and kill it after ``limit`` seconds.

    Raises NotifyError if it fails.
    """
    # Files, not pipes: the program may not read, or leave a process that keeps a pipe open.
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
        stdin.write(body)
        stdin.seek(0)
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            raise NotifyError(f"cannot run {command[0]}: {error.strerror}") from None
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise NotifyError(f"{command[0]} did not end within {limit:g} s") from None
        if status != 0:
            size = stderr.seek(0, os.SEEK_END)
            stderr.seek(max(0, size - 4096))
            words = stderr.read().decode(errors="replace").strip().splitlines()
            ended_by = signal_name(-status) or f"signal {-status}"
            how = f"status {status}" if status > 0 else ended_by
            why = f": {words[-1][:500]}" if words else ""
            raise NotifyError(f"{command[0]} failed with {how}{why}")
