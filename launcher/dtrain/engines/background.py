"""Launches in a separate background process, which outlives the process that starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from dtrain.diagnostics import DtrainError, ExitCode
from dtrain.engines.select import engine
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.decode import decode
from dtrain.runs.record import Request
from dtrain.session.control import Control
from dtrain.session.observer import NullObserver
from dtrain.session.signals import on_signals, stop_by_signal

LOG = "launcher.log"
"""File in the run's folder: what the launcher wrote to stderr."""

_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from dtrain.engines.background import main
main()
"""


class BackgroundError(DtrainError):
    """The background process ended before it created the run's folder."""

    exit_code = ExitCode.NODE_FAILED


def start(request: Request, secrets: Mapping[str, str]) -> str:
    """Launch in the background. Returns the run's name once its workers have started or failed.

    The background process cannot prompt. Raises BackgroundError if this machine cannot store the
    run's files.
    """
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    # On stdin, because other users can see the arguments of a process.
    message = json.dumps({"request": asdict(request), "secrets": dict(secrets)})
    answer, errors = process.communicate(message.encode())
    reply = json.loads(answer) if answer else {}
    if "run" in reply:
        return str(reply["run"])
    last = errors.decode(errors="replace").strip().rpartition("\n")[2]
    raise BackgroundError(
        reply.get("error") or f"the background launch ended at once: {last}",
        hint=reply.get("hint", ""),
    )


def main() -> None:
    """Entry point of the background process. Reads a request from stdin and writes the answer to
    stdout. Closes stdout once all workers have started."""
    # The parent waits only for its direct child, so the grandchild never becomes its zombie.
    if os.fork():
        os._exit(0)
    message = json.loads(sys.stdin.buffer.read())
    request = decode(Request, message["request"], "request")
    observer, control = _ParentNotifier(), Control()
    with on_signals(lambda number: stop_by_signal(control, number)):
        try:
            with engine(request, observer, control, on_running=observer.end_answer) as launch:
                launch.run(message["secrets"])
        except DtrainError as error:
            observer.answer({"error": error.message, "hint": error.hint})


class _ParentNotifier(NullObserver):
    """Sends the run's name to the parent, and redirects this process's output to a log file."""

    def __init__(self) -> None:
        self._stdout = os.dup(1)
        self._answered = False

    def started(self, run: str, plan: LaunchPlan, folder: str) -> None:
        self.answer({"run": run})
        log = os.open(Path(folder) / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(log)
        os.close(null)

    def answer(self, reply: Mapping[str, str]) -> None:
        if not self._answered:
            self._answered = True
            os.write(self._stdout, json.dumps(reply).encode())

    def end_answer(self, run: str) -> None:
        """The parent need not wait any longer."""
        os.close(self._stdout)
