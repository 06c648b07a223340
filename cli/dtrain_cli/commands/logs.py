"""`dtrain logs`: what a run's workers have written."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass

from dtrain.diagnostics import ExitCode
from dtrain.journal import JournalReader
from dtrain.launchplan import LaunchPlan
from dtrain.logs.store import RunFolder
from dtrain.record import Record
from dtrain_cli.commands.select import hosts, ranks
from dtrain_cli.commands.watch import on_signals
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
    left = threading.Event()
    view = make_view(
        options.json, sys.stdout, sys.stderr, filters, options.fold, on_broken_pipe=left.set
    )
    view.known(plan)
    with on_signals(lambda number: left.set()):
        if options.since is not None:
            _skip(view, folder, plan, time.time() - options.since)
        while True:
            going_on = options.follow and folder.in_charge() is not None
            for stream, size in folder.sizes(plan).items():
                view.output(stream, size)
            if not going_on or left.wait(POLL):
                break
        view.close()
        while not view.wait(POLL):
            if left.is_set():
                view.hurry()
    return ExitCode.INTERRUPTED if left.is_set() else ExitCode.OK


def _skip(view: View, folder: RunFolder, plan: LaunchPlan, before: float) -> None:
    """Leave out what had come ``before`` (seconds since the epoch), to within the time between two
    notes of it in the journal."""
    known: dict[str, int] = {}
    for event in JournalReader(folder.journal).read():
        if event["event"] == "sizes" and event["time"] <= before:
            known.update(event["streams"])
    for stream in folder.sizes(plan):
        view.skip(stream, known.get(f"{stream.host}/{stream.path.name}", 0))
