"""Leaving a launch to a process in the background.

The process is forked before there is any thread, and stays on the terminal until the job runs:
it may have to ask for a passphrase, and what goes wrong until then is told here. Then it leaves
the terminal for a session of its own, and whoever waits for it may go.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from dtrain.diagnostics import ExitCode

LOG = "launcher.log"


class Detachment:
    """Both ends of it: ``in_background`` tells which one this process is."""

    def __init__(self) -> None:
        """Forks."""
        self._read, self._write = os.pipe()
        self._child = os.fork()
        self.in_background = self._child == 0
        os.close(self._read if self.in_background else self._write)

    @classmethod
    def none(cls) -> Detachment:
        """For a launch that stays in the foreground."""
        detachment = cls.__new__(cls)
        detachment.in_background = False
        return detachment

    def leave_terminal(self, run: str, folder: Path) -> None:
        """From now on nothing that happens to the terminal concerns this process; what it says
        goes to a file in the run's folder. Whoever waits is told the run's name."""
        os.setsid()
        log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(log)
        os.close(null)
        with contextlib.suppress(BrokenPipeError):  # nobody waits any more
            os.write(self._write, run.encode())
        os.close(self._write)

    def wait(self) -> str | ExitCode:
        """Until the launch has left the terminal, or ended before that: the run's name, or how it
        ended."""
        # Ctrl-C goes to both processes, and the other one acts on it.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, _: os.kill(self._child, number))
        if run := os.read(self._read, 4096):
            return run.decode()
        _, status = os.waitpid(self._child, 0)
        code = os.waitstatus_to_exitcode(status)
        return ExitCode(code) if code in {int(known) for known in ExitCode} else ExitCode.INTERNAL
