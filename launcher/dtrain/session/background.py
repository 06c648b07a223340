"""Launches in a process of its own, which goes on after the one that started it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from dtrain.diagnostics import DtrainError, ExitCode
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.decode import decode
from dtrain.runs.record import Request
from dtrain.session.control import Control
from dtrain.session.controller import Session
from dtrain.session.observer import Nobody
from dtrain.session.signals import on_signals, stop_by_signal
from dtrain.transport.select import Transports

LOG = "launcher.log"
"""File in the run's folder: what the launcher wrote to stderr."""

_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from dtrain.session.background import main
main()
"""


class BackgroundError(DtrainError):
    """The background process ended before the run had a folder."""

    exit_code = ExitCode.NODE_FAILED


def start(request: Request, secrets: Mapping[str, str]) -> str:
    """Launch in the background; the run's name, once its workers have started or have failed to.

    No question can be asked. Raises BackgroundError if this machine cannot keep the run's files.
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
    order = json.dumps({"request": asdict(request), "secrets": dict(secrets)})
    answer, errors = process.communicate(order.encode())
    said = json.loads(answer) if answer else {}
    if "run" in said:
        return str(said["run"])
    last = errors.decode(errors="replace").strip().rpartition("\n")[2]
    raise BackgroundError(
        said.get("error") or f"the launch in the background ended at once: {last}",
        hint=said.get("hint", ""),
    )


def main() -> None:
    """The program of the background process. Its order comes on stdin; what it answers on stdout
    ends once all workers have started."""
    # The parent waits for its child only: the child's child is nobody's zombie.
    if os.fork():
        os._exit(0)
    order = json.loads(sys.stdin.buffer.read())
    request = decode(Request, order["request"], "request")
    observer, control = _Answering(), Control()
    transport = Transports(request.base)
    session = Session(
        request,
        transport=transport,
        observer=observer,
        control=control,
        on_running=lambda run: observer.end_answer(),
    )
    with on_signals(lambda number: stop_by_signal(control, number)):
        try:
            session.run(order["secrets"])
        except DtrainError as error:
            observer.answer({"error": error.message, "hint": error.hint})
        finally:
            transport.close()


class _Answering(Nobody):
    """Tells the parent the run's name, and moves this process's output to the run's folder."""

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

    def answer(self, said: Mapping[str, str]) -> None:
        if not self._answered:
            self._answered = True
            os.write(self._stdout, json.dumps(said).encode())

    def end_answer(self) -> None:
        os.close(self._stdout)
