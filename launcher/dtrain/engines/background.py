"""Launches in the background for any program: a new process without threads detaches itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from dtrain.diagnostics import DtrainError, ExitCode
from dtrain.engines.detachment import Detachment
from dtrain.engines.select import engine
from dtrain.messages.decode import decode
from dtrain.runs.events import RunEvent, RunLaunched
from dtrain.runs.folder import RunFolder
from dtrain.runs.request import Request
from dtrain.session.caller import Caller
from dtrain.session.reporting.observer import Observer
from dtrain.session.stopping.control import Control
from dtrain.session.stopping.signals import on_signals, stop_by_signal

# Modules in the current folder, such as a `queue.py`, are not ours.
_PROGRAM = """
import sys
sys.path = [sys.argv[1], *filter(None, sys.path)]
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
    """Entry point of a new process. Reads a request from stdin and writes the answer to stdout,
    once the launch goes on in the background or has ended."""
    message = json.loads(sys.stdin.buffer.read())
    request = decode(Request, message["request"], "request")
    detachment = Detachment()
    if not detachment.in_background:
        try:
            begun = detachment.wait()
        except DtrainError as error:
            _answer({"error": error.message, "hint": error.hint})
            return
        if isinstance(begun, str):
            _answer({"run": begun})
        return
    observer = _RunName()
    left = False

    def leave(run: str) -> None:
        nonlocal left
        detachment.leave_terminal(run, RunFolder.find(run).path)
        left = True

    caller = Caller(observer, Control(), on_running=leave)
    with on_signals(lambda number: stop_by_signal(caller.control, number)):
        try:
            with engine(request, caller, starts=True) as launch:
                launch.run(message["secrets"])
        except DtrainError as error:
            if not observer.run:
                _answer({"error": error.message, "hint": error.hint})
    if observer.run and not left:
        _answer({"run": observer.run})


class _RunName(Observer):
    """Remembers the run's name."""

    run = ""

    def on_event(self, event: RunEvent) -> None:
        if isinstance(event, RunLaunched):
            self.run = event.run


def _answer(reply: Mapping[str, str]) -> None:
    sys.stdout.write(json.dumps(reply))
