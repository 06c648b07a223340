"""`dtrain logs`: what a run's workers have written."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

from dtrain.diagnostics import ExitCode
from dtrain.journal import JournalReader, NextAttempt, Sizes
from dtrain.launchplan import LaunchPlan
from dtrain.logs.store import RunFolder, Stream
from dtrain.record import Record
from dtrain_cli.commands.select import hosts, ranks
from dtrain_cli.commands.watch import Departure, on_signals
from dtrain_cli.standard import OutputError
from dtrain_cli.views import Filters, View, make_view

POLL = 0.1
"""Seconds between two looks at files that may have grown."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of `dtrain logs`."""

    run: str
    follow: bool
    json: bool
    fold: bool
    ranks: str | None
    hosts: str | None
    since: float | None
    """Seconds; what came before is left out."""


def logs(options: Options) -> ExitCode:
    """Show a run's output, and with ``follow`` what comes as it comes, until the run is over."""
    folder = RunFolder.find(options.run)
    record = Record.load(folder.path)
    plan, spec = record.plan(), record.request.spec()
    filters = Filters(ranks(options.ranks, spec), hosts(options.hosts, spec))
    departure = Departure()
    view = make_view(options.json, sys.stdout, sys.stderr, filters, options.fold, departure.ask)
    view.known(plan)
    journal = JournalReader(folder.journal)
    with on_signals(departure.ask):
        if options.since is not None:
            _skip(view, _streams(folder, plan, record.attempt), folder, time.time() - options.since)
        while True:
            going_on = options.follow and folder.in_charge() is not None
            if any(isinstance(event, NextAttempt) for _, event in list(journal.read())):
                record = Record.load(folder.path)
                plan = record.plan()
            for stream, size in _streams(folder, plan, record.attempt).items():
                view.output(stream, size)
            if not going_on or view.output_error or departure.wait(POLL):
                break
        view.close()
        while not view.wait(POLL) and not departure.asked:
            pass
    if view.output_error is not None:
        raise OutputError(view.output_error)
    return ExitCode.INTERRUPTED if departure.asked else ExitCode.OK


def _streams(folder: RunFolder, plan: LaunchPlan, attempts: int) -> dict[Stream, int]:
    """Those of all attempts, the first one's first."""
    found: dict[Stream, int] = {}
    for one in folder.attempts():
        if one.attempt <= attempts:
            found |= one.sizes(plan)
    return found


def _skip(view: View, streams: Iterable[Stream], folder: RunFolder, before: float) -> None:
    """Leave out what had come ``before`` (seconds since the epoch), to within the time between two
    notes of it in the journal."""
    known: dict[str, int] = {}
    for then, event in JournalReader(folder.journal).read():
        if isinstance(event, Sizes) and then <= before:
            known.update(event.streams)
    for stream in streams:
        view.skip(stream, known.get(str(stream.path.relative_to(folder.path)), 0))
