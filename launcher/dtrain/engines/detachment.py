"""Continues a launch in a background process, which is forked before any thread starts.

The background process stays on the terminal until the job runs: it may have to ask for a
passphrase, and errors until then belong on the terminal. Then it moves to a new session, and the
foreground process exits.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from dtrain.diagnostics import DtrainError, ExitCode
from dtrain.runs.storage import storing

LOG = "launcher.log"
"""File in the run's folder: what the background process wrote to stdout and stderr."""


class LauncherKilledError(DtrainError):
    """A signal has ended the process in the background."""

    exit_code = ExitCode.NODE_FAILED


class Detachment:
    """Both processes of a detached launch; ``in_background`` is true in the background one."""

    def __init__(self) -> None:
        """Forks."""
        self._read, self._write = os.pipe()
        self._child = os.fork()
        self.in_background = self._child == 0
        os.close(self._read if self.in_background else self._write)

    def leave_terminal(self, run: str, folder: Path) -> None:
        """Detach from the terminal: redirect output to a file in the run's folder, and send the
        run's name to the waiting foreground process. Raises StorageError."""
        os.setsid()
        with storing(folder / LOG):
            log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(log)
        os.close(null)
        with contextlib.suppress(BrokenPipeError):  # the foreground process is gone
            os.write(self._write, run.encode())
        os.close(self._write)

    def wait(self) -> str | ExitCode:
        """Wait until the launch leaves the terminal, and return the run's name. If the launch ends
        before that, return its exit code. Raises LauncherKilledError."""
        # Both processes receive Ctrl-C; the background one handles it.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, _: os.kill(self._child, number))
        if run := os.read(self._read, 4096):
            return run.decode()
        _, status = os.waitpid(self._child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            raise LauncherKilledError(
                f"a signal ({signal.strsignal(-code)}) ended the launcher in the background before "
                "all workers ran",
                hint="this machine may be out of memory: look at `dmesg`; `dtrain ps` shows the "
                "run, and `dtrain stop` ends what it has started",
            )
        return ExitCode(code) if code in {int(known) for known in ExitCode} else ExitCode.INTERNAL
