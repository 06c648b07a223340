"""`dtrain logs`: show the output of a run's workers.

Views read the stored streams in every command, and here they have no other source: there is no
library call to make.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated

import typer

from dtrain.diagnostics import ExitCode, UsageError
from dtrain.launchplan.plan import LaunchPlan
from dtrain.runs.arrival_times import offset_at
from dtrain.runs.events import NextAttempt, OutputFollows
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import JournalReader
from dtrain.runs.log_store import Stream
from dtrain.runs.record import Record
from dtrain.runs.status import find_run
from dtrain.runs.stream_reader import last_lines
from dtrain.session.stopping.signals import on_signals
from dtrain_cli.commands.select import filters_of_run, seconds_of
from dtrain_cli.parameters import AnyRun, Fold, OnlyHosts, OnlyRanks, Timestamps, flag, option
from dtrain_cli.standard import unwritable
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
    tail: Annotated[
        int | None, option("Only the last N lines of each worker's stdout and stderr.", "N")
    ] = None,
    json: Annotated[bool, flag("One JSON object per line.", "--json")] = False,
    fold: Fold = False,
    timestamps: Timestamps = False,
) -> None:
    """Show the output of a run's workers."""
    age = seconds_of("--since", since)
    if tail is not None and tail < 0:
        raise UsageError(f"--tail {tail} is not possible", hint="give 0 or a larger number")
    folder = find_run(run)
    record = Record.load(folder.path)
    chosen = filters_of_run(rank, host, folder)
    leaving = threading.Event()
    view = make_view(
        sys.stdout,
        sys.stderr,
        chosen,
        lambda: None,  # `_show` looks for its error
        json=json,
        fold=fold,
        timestamps=timestamps,
        by_arrival=True,
    )
    if run != folder.name and not json:
        view.notice(f"output of run {folder.name}")
    streams = _streams(folder, record.plan, record.attempt)
    shown = {stream: size for stream, size in streams.items() if chosen.show(stream)}
    if not json and not any(shown.values()):
        who = "none of these workers" if any(streams.values()) else "no worker"
        yet = "" if folder.in_charge() is None else " yet"
        view.notice(f"{who} has written anything{yet}")
    then = None if age is None else time.time() - age
    for stream, begin in _begins(shown, then, tail).items():
        view.skip(stream, begin)
    _show(view, folder, record, streams, leaving, follow=follow)
    raise typer.Exit(ExitCode.INTERRUPTED if leaving.is_set() else ExitCode.OK)


def _show(
    view: View,
    folder: RunFolder,
    record: Record,
    streams: Mapping[Stream, int],
    leaving: threading.Event,
    *,
    follow: bool,
) -> None:
    """Show what ``streams`` have, and with ``follow`` new output until the run ends."""
    plan = record.plan
    view.on_event(OutputFollows(plan))
    journal = JournalReader(folder.journal)
    going_on = follow
    with on_signals(lambda number: leaving.set()):
        while True:
            for stream, size in streams.items():
                view.output(stream, size)
            if not going_on or view.output_error or leaving.wait(POLL):
                break
            going_on = folder.in_charge() is not None
            if any(isinstance(event, NextAttempt) for _, event in list(journal.read())):
                record = Record.load(folder.path)
                plan = record.plan
            streams = _streams(folder, plan, record.attempt)
        view.close()
        while not (view.wait(POLL) or view.output_error or leaving.is_set()):
            pass
    if view.output_error is not None and not leaving.is_set():
        raise unwritable(view.output_error)


def _streams(folder: RunFolder, plan: LaunchPlan, attempts: int) -> dict[Stream, int]:
    """The streams of all attempts, the first attempt first."""
    found: dict[Stream, int] = {}
    for one in folder.attempts():
        if one.attempt <= attempts:
            found |= one.sizes(plan)
    return found


def _begins(streams: dict[Stream, int], then: float | None, tail: int | None) -> dict[Stream, int]:
    """Where to begin to show each stream, so that it is output that arrived at ``then`` or later,
    in seconds since the epoch, and at most ``tail`` lines. A worker has a stream in each attempt:
    the latest lines count."""
    found = dict.fromkeys(streams, 0)
    if then is not None:
        for stream, size in streams.items():
            offset = offset_at(stream.path, then)
            found[stream] = size if offset is None else offset
    if tail is not None:
        missing: dict[str, int] = {}
        for stream, size in reversed(streams.items()):
            name = stream.path.name
            with suppress(OSError):  # the view says why it cannot read the stream
                offset, missing[name] = last_lines(stream.path, size, missing.get(name, tail))
                found[stream] = max(found[stream], offset)
    return found
