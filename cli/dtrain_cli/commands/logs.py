"""`dtrain logs`: show the output of a run's workers.

Views read the stored streams in every command, and here they have no other source: there is no
library call to make.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import Annotated

import typer

from dtrain.diagnostics import ExitCode
from dtrain.launchplan.plan import LaunchPlan
from dtrain.runs.arrival_times import offset_at
from dtrain.runs.events import NextAttempt, OutputFollows
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import JournalReader
from dtrain.runs.log_store import Stream
from dtrain.runs.record import Record
from dtrain.runs.status import find_run
from dtrain.session.stopping.signals import on_signals
from dtrain_cli.commands.select import filters_of_run, seconds_of
from dtrain_cli.declare import flag, option
from dtrain_cli.parameters import AnyRun, Fold, OnlyHosts, OnlyRanks, Timestamps
from dtrain_cli.standard import OutputError
from dtrain_cli.views import make_view
from dtrain_cli.views.view import View

POLL = 0.1
"""Seconds between two checks of the log files for new output."""


def logs(
    run: AnyRun,
    follow: Annotated[
        bool, flag("Print new output as it arrives, until the run ends.", "--follow", "-f")
    ] = False,
    rank: OnlyRanks = None,
    host: OnlyHosts = None,
    since: Annotated[str | None, option("Only output of the last TIME, e.g. 10m.", "TIME")] = None,
    json: Annotated[bool, flag("One JSON object per line.", "--json")] = False,
    fold: Fold = False,
    timestamps: Timestamps = False,
) -> None:
    """Show the output of a run's workers."""
    age = seconds_of("--since", since)
    folder = find_run(run)
    record = Record.load(folder.path)
    chosen = filters_of_run(rank, host, folder)
    leaving = threading.Event()
    view = make_view(
        sys.stdout,
        sys.stderr,
        chosen,
        leaving.set,
        json=json,
        fold=fold,
        timestamps=timestamps,
        by_arrival=True,
    )
    if run != folder.name and not json:
        view.notice(f"output of run {folder.name}")
    _show(view, folder, record, leaving, follow=follow, age=age)
    raise typer.Exit(ExitCode.INTERRUPTED if leaving.is_set() else ExitCode.OK)


def _show(
    view: View,
    folder: RunFolder,
    record: Record,
    leaving: threading.Event,
    *,
    follow: bool,
    age: float | None,
) -> None:
    """Show a run's output, and with ``follow`` new output until the run ends. Leave out output
    older than ``age`` seconds."""
    plan = record.plan
    view.on_event(OutputFollows(plan))
    journal = JournalReader(folder.journal)
    with on_signals(lambda number: leaving.set()):
        if age is not None:
            _skip(view, _streams(folder, plan, record.attempt), time.time() - age)
        while True:
            going_on = follow and folder.in_charge() is not None
            if any(isinstance(event, NextAttempt) for _, event in list(journal.read())):
                record = Record.load(folder.path)
                plan = record.plan
            for stream, size in _streams(folder, plan, record.attempt).items():
                view.output(stream, size)
            if not going_on or view.output_error or leaving.wait(POLL):
                break
        view.close()
        while not view.wait(POLL) and not leaving.is_set():
            pass
    if view.output_error is not None:
        raise OutputError(view.output_error)


def _streams(folder: RunFolder, plan: LaunchPlan, attempts: int) -> dict[Stream, int]:
    """The streams of all attempts, the first attempt first."""
    found: dict[Stream, int] = {}
    for one in folder.attempts():
        if one.attempt <= attempts:
            found |= one.sizes(plan)
    return found


def _skip(view: View, streams: Mapping[Stream, int], before: float) -> None:
    """Skip the output that arrived before ``before`` (seconds since the epoch). ``streams``: their
    sizes."""
    for stream, size in streams.items():
        offset = offset_at(stream.path, before)
        view.skip(stream, size if offset is None else offset)
