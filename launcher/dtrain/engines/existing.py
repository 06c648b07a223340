"""Watches, questions and stops runs that this or another process launched before.

One process at a time is in charge of a run. Other processes read the run's folder, and stop the run
with a signal or a file in the folder. If no process is in charge, the process that watches or stops
the run takes over.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace

from dtrain.diagnostics import ExitCode, UsageError
from dtrain.engines.contract import Engine
from dtrain.failures.cause import LEFT, Report
from dtrain.runs.events import (
    AttemptPlanned,
    Finished,
    LauncherAttached,
    NoticeShown,
    RunEvent,
    RunLeft,
    StacksReported,
)
from dtrain.runs.folder import Holder, RunFolder
from dtrain.runs.record import Record
from dtrain.runs.status import status
from dtrain.runs.storage import StorageError
from dtrain.session.caller import Caller
from dtrain.session.reporting.follow import POLL, RunFollower, ending
from dtrain.session.reporting.observer import Observer
from dtrain.session.stopping import stop_requests
from dtrain.session.stopping.control import Control
from dtrain.session.stopping.signals import INSIST, STOP, are_handled
from dtrain.session.watching import stack_requests
from dtrain.spec.secrets import known_secrets

EXIT_SECONDS = 5.0
"""Seconds that the launcher may take to exit after the run is over: its terminal may block."""


def attach(
    folder: RunFolder, caller: Caller, following: Callable[[], None] = lambda: None
) -> Report:
    """Follow a run until it ends or the caller leaves it. Take over if its launcher exits. Of a run
    that is over, show the end. ``following`` is called whenever all later events will be seen.

    Raises UsageError if this version cannot read the run.
    """
    Record.load(folder.path)
    while (report := ending(folder)) is None:
        claim = folder.claim(signals=are_handled())
        if claim is None:
            report = _watch(folder, caller, following)
            if report is not None:
                return report
            continue
        with closing(claim):
            if ending(folder) is not None:  # The launcher exited just now.
                continue
            # Read it only now: the previous launcher may have restarted the job.
            record = Record.load(folder.path)
            secrets = known_secrets(record.request.spec(), os.environ)
            with _engine(record, caller) as engine:
                following()
                return engine.attach(record, folder, secrets)
    RunFollower(folder, Record.load(folder.path), caller.observer).skip()
    caller.observer.on_event(Finished(report))
    return report


def stacks(folder: RunFolder, caller: Caller) -> StacksReported | Report:
    """Where the workers of a run are, or the report of a run that the caller left or that ended
    first. The process in charge asks the hosts; if there is none, this one takes charge meanwhile.

    Raises UsageError as `attach`, or if the run is over.
    """
    if ending(folder) is not None:
        raise UsageError(f"run {folder.name} is over", hint=f"`dtrain ps {folder.name}` shows it")
    if status(folder).state == "queued":
        caller.observer.notice(f"run {folder.name} is queued: no worker runs yet")
    asking = _Asking(folder, caller)
    report = attach(folder, replace(caller, observer=asking), asking.ask)
    return asking.answer or report


class _Asking(Observer):
    """Leaves the run once the workers' stacks are there."""

    def __init__(self, folder: RunFolder, caller: Caller) -> None:
        self._folder = folder
        self._caller = caller
        self.answer: StacksReported | None = None

    def ask(self) -> None:
        """Raises StorageError."""
        stack_requests.place(self._folder)

    def on_event(self, event: RunEvent) -> None:
        match event:
            case StacksReported() if self.answer is None:
                self.answer = event
                self._caller.control.leave()
            case AttemptPlanned() | LauncherAttached():
                # What ended may have taken the request, and then answers no more.
                with suppress(StorageError):
                    self.ask()
            case NoticeShown():
                self._caller.observer.on_event(event)


def watch(folder: RunFolder, caller: Caller) -> Report:
    """Follow a run that another process is in charge of, until it ends or the caller leaves it.

    Raises UsageError if the run is over, or if no process is in charge.
    """
    if ending(folder) is not None:
        raise UsageError(f"run {folder.name} is over", hint=f"`dtrain ps {folder.name}` shows it")
    report = _watch(folder, caller) if folder.in_charge() is not None else None
    if report is None:
        raise UsageError(
            f"run {folder.name} has no launcher",
            hint=f"`dtrain attach {folder.name}` takes charge of it and shows it",
        )
    return report


def _watch(
    folder: RunFolder, caller: Caller, following: Callable[[], None] = lambda: None
) -> Report | None:
    """Follow what the process in charge writes. None if it exits before the run is over."""
    follower = RunFollower(folder, Record.load(folder.path), caller.observer)
    follower.skip()
    follower.show_training()
    following()
    report = follower.follow(lambda seconds: _wait(caller.control, seconds))
    if report is not None:
        caller.observer.on_event(Finished(report))
    elif caller.control.interrupted:
        caller.observer.on_event(RunLeft(folder.name))
        report = LEFT
    return report


def _wait(control: Control, seconds: float) -> bool:
    if not control.interrupted:
        control.wait(seconds)
    return control.interrupted


def stop(folder: RunFolder, caller: Caller, *, force: bool) -> ExitCode:
    """Stop a run and end its leftover processes; the process in charge does the work.

    Returns OK once the run has ended, INTERRUPTED if the caller ended the wait, and else
    the exit code of a run that failed first. Raises UsageError if the run is already over or if
    another user, or a process on another machine, is in charge.
    """
    asked: set[int] = set()
    waited = False
    while not _is_clean(folder):
        claim = folder.claim(signals=are_handled())
        if claim is not None:
            with closing(claim):
                return _end(folder, caller, force=force)
        report = _request_stop(folder, caller, asked, force=force)
        waited = True
        if caller.control.interrupted:
            return ExitCode.INTERRUPTED
        if report is not None and _is_clean(folder):
            caller.observer.on_event(Finished(report))
    if not waited:
        raise UsageError(f"run {folder.name} is over already")
    return ExitCode.OK


def _engine(record: Record, caller: Caller) -> AbstractContextManager[Engine]:
    from dtrain.engines.select import engine  # few watchers take over a run

    return engine(record.request, caller)


def _is_clean(folder: RunFolder) -> bool:
    """Whether the run is over and left no processes."""
    return ending(folder) is not None and not Record.load(folder.path).leftovers


def _end(folder: RunFolder, caller: Caller, *, force: bool) -> ExitCode:
    """Take over a run without a launcher. Stop it, or end its leftover processes."""
    record = Record.load(folder.path)
    with _engine(record, caller) as engine:
        if ending(folder) is not None:
            if engine.clean(record, folder):
                caller.observer.notice("no processes are left")
                return ExitCode.OK
            caller.observer.notice(f"`dtrain stop {folder.name}` tries again")
            return ExitCode.INTERRUPTED if caller.control.interrupted else ExitCode.NODE_FAILED
        (caller.control.kill if force else caller.control.stop)("dtrain stop")
        secrets = known_secrets(record.request.spec(), os.environ)
        code = engine.attach(record, folder, secrets).exit_code
    if code is not ExitCode.INTERRUPTED:
        return code
    return ExitCode.OK if _is_clean(folder) else ExitCode.NODE_FAILED


def _request_stop(
    folder: RunFolder, caller: Caller, asked: set[int], *, force: bool
) -> Report | None:
    """Have the process in charge end the run, and wait until it exits. Returns how the run ended.
    ``asked``: the processes that have got the request."""
    follower = RunFollower(folder, Record.load(folder.path), caller.observer)
    follower.skip()
    # If the run is over, the process in charge is already ending its leftovers.
    over = follower.state.report is not None
    if not over:
        holder = folder.holder()
        pid = holder.pid if holder is not None else None

        def wait(seconds: float) -> bool:
            if holder is not None and holder.pid not in asked and _ask(holder, folder, force=force):
                asked.add(holder.pid)
            # Another process may take charge when this one exits. The next call asks it.
            return _wait(caller.control, seconds) or folder.in_charge() != pid

        follower.follow(wait)
        follower.read_new()
    until = math.inf if over else time.monotonic() + EXIT_SECONDS
    while follower.state.report is not None and folder.in_charge() is not None:
        if _wait(caller.control, POLL) or time.monotonic() > until:
            break
    return None if over else follower.state.report


def _ask(holder: Holder, folder: RunFolder, *, force: bool) -> bool:
    """Ask the process in charge to stop the run. False if it does not listen yet."""
    if stop_requests.send(folder, holder.pid, force=force):
        return True
    if holder.signals or holder.elsewhere:
        _signal(holder, INSIST if force else STOP, folder)
    return holder.signals


def _signal(holder: Holder, number: int, folder: RunFolder) -> None:
    pid = holder.pid
    if holder.elsewhere:
        raise UsageError(
            f"process {pid} on {holder.elsewhere} is in charge of run {folder.name}",
            hint=f"run `dtrain stop {folder.name}` on {holder.elsewhere}",
        )
    try:
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)  # Ctrl-Z may have stopped it
    except ProcessLookupError:
        pass
    except PermissionError:
        raise UsageError(
            f"process {pid}, which is in charge of run {folder.name}, belongs to another user",
            hint="stop the run as that user",
        ) from None
