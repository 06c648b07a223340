"""Watches and stops runs that were launched before, by this process or another one.

One process at a time is in charge of a run. Others read the run's folder, and ask the one in
charge to stop by a signal or a file in the folder. If no process is in charge, whoever watches or
stops takes over.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from dtrain.diagnostics import ExitCode, UsageError
from dtrain.failures.cause import Report
from dtrain.runs.log_store import RunFolder
from dtrain.runs.record import Record
from dtrain.session import stop_requests
from dtrain.session.control import Control
from dtrain.session.controller import Session
from dtrain.session.follow import POLL, Follower, ending
from dtrain.session.observer import Observer
from dtrain.session.secrets import known_secrets
from dtrain.session.signals import INSIST

LETTING_GO = 5.0
"""Seconds that a process has to go after the run is over: nobody may read what it shows."""

Sessions = Callable[[Record], AbstractContextManager[Session]]
"""Makes the session that takes over a run, and closes it."""


def attach(
    folder: RunFolder, *, sessions: Sessions, observer: Observer, control: Control
) -> Report:
    """Follow a run until it ends or ``control`` leaves it, and take over if its launcher goes.

    Raises UsageError if the run is over.
    """
    if ending(folder) is not None:
        raise UsageError(f"run {folder.name} is over", hint=f"`dtrain logs {folder.name}` shows it")
    while True:
        claim = folder.claim()
        if claim is None:
            report = _look_on(folder, observer, control)
            if report is not None:
                return report
            continue
        try:
            if (report := ending(folder)) is not None:
                observer.finished(report)
                return report
            # Only now, because whoever was in charge before may have started the job again.
            record = Record.load(folder.path)
            secrets = known_secrets(record.request.spec(), os.environ)
            with sessions(record) as session:
                return session.attach(record, folder, secrets)
        finally:
            claim.release()


def _look_on(folder: RunFolder, observer: Observer, control: Control) -> Report | None:
    """Follow what the process in charge writes. None if it goes before the run is over."""
    follower = Follower(folder, Record.load(folder.path), observer)
    follower.skip()
    report = follower.follow(lambda seconds: _is_asked(control, seconds))
    if report is not None:
        observer.finished(report)
    elif control.interrupted:
        observer.left(folder.name)
        report = Report(ExitCode.INTERRUPTED, "left")
    return report


def _is_asked(control: Control, seconds: float) -> bool:
    if not control.interrupted:
        control.wait(seconds)
    return control.interrupted


def stop(
    folder: RunFolder, *, force: bool, sessions: Sessions, observer: Observer, control: Control
) -> ExitCode:
    """End a run, and what it has left on its hosts; whoever is in charge of it does it.

    OK once it has ended; INTERRUPTED if ``control`` was asked not to wait; otherwise how the run
    has failed meanwhile. Raises UsageError if it is over already, or if another user is in charge.
    """
    asked: set[int] = set()
    waited = False
    while not _is_clean(folder):
        claim = folder.claim()
        if claim is not None:
            try:
                return _end(folder, force, sessions, observer, control)
            finally:
                claim.release()
        report = _ask(folder, force, asked, observer, control)
        waited = True
        if control.interrupted:
            return ExitCode.INTERRUPTED
        if report is not None and _is_clean(folder):
            observer.finished(report)
    if not waited:
        raise UsageError(f"run {folder.name} is over already")
    return ExitCode.OK


def _is_clean(folder: RunFolder) -> bool:
    """Whether nothing is left to be ended."""
    return ending(folder) is not None and not Record.load(folder.path).stray


def _end(
    folder: RunFolder, force: bool, sessions: Sessions, observer: Observer, control: Control
) -> ExitCode:
    """Take over a run that no process is in charge of, and end it, or what it has left behind."""
    record = Record.load(folder.path)
    with sessions(record) as session:
        if ending(folder) is not None:
            if session.clean(record, folder):
                observer.notice("nothing is left of it now")
                return ExitCode.OK
            observer.notice("some hosts cannot be reached; stop it again when they can")
            return ExitCode.INTERRUPTED if control.interrupted else ExitCode.NODE_FAILED
        (control.kill if force else control.stop)("dtrain stop")
        code = session.attach(record, folder, None).exit_code
    return ExitCode.OK if code is ExitCode.INTERRUPTED else code


def _ask(
    folder: RunFolder, force: bool, asked: set[int], observer: Observer, control: Control
) -> Report | None:
    """Have the process in charge end the run, and wait until it has gone; how the run ended.
    ``asked`` are those that have been asked before."""
    follower = Follower(folder, Record.load(folder.path), observer)
    follower.skip()
    # One that is in charge of a run that is over ends what is left of it, and is left to it.
    over = follower.report is not None
    if not over:
        pid = folder.in_charge()
        if pid is not None and pid not in asked:
            asked.add(pid)
            if not stop_requests.send(folder, pid, force=force):
                _signal(pid, INSIST if force else signal.SIGTERM, folder)
        # Another process may take charge when it leaves, and is then asked in its turn.
        follower.follow(lambda seconds: _is_asked(control, seconds) or folder.in_charge() != pid)
        follower.look()
    until = math.inf if over else time.monotonic() + LETTING_GO
    while follower.report is not None and folder.in_charge() is not None:
        if _is_asked(control, POLL) or time.monotonic() > until:
            break
    return None if over else follower.report


def _signal(pid: int, number: int, folder: RunFolder) -> None:
    try:
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)  # Ctrl-Z may have stopped it
    except ProcessLookupError:
        pass
    except PermissionError:
        raise UsageError(
            f"process {pid}, which is in charge of run {folder.name}, is another user's",
            hint="stop the run as that user",
        ) from None
