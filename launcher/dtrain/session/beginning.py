"""Begins a run, or takes over an earlier one. All engines use it."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from dtrain.diagnostics import UsageError
from dtrain.messages.agent import Revision
from dtrain.messages.decode import decode
from dtrain.node.revision import revision
from dtrain.runs import events
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import Journal
from dtrain.runs.observed import ObservedAttempt, ObservedRun
from dtrain.runs.record import Record, run_name
from dtrain.runs.request import Request
from dtrain.session.caller import Caller
from dtrain.session.stopping.control import Control
from dtrain.session.stopping.signals import are_handled
from dtrain.session.stopping.stop_requests import listening
from dtrain.spec.model import ClusterFile
from dtrain.spec.problems import nearest, shown
from dtrain.sync import Tree, local_folder, scan


@contextmanager
def new_run(
    request: Request, caller: Caller, tree: Tree | None
) -> Iterator[tuple[Record, RunFolder]]:
    """Give the run a name, a folder and a record, and be in charge of it inside the context.
    ``tree``: the files of ``job.sync``.

    Raises StorageError if this machine cannot store the run's files.
    """
    begun = time.time()
    spec = request.spec()
    name = run_name(spec.name, begun)
    record = Record(name, request, spec.job.rendezvous.first_port, sys.executable, begun)
    folder = RunFolder.create(name)
    with ExitStack() as charge:
        try:
            if (claim := folder.claim(signals=are_handled())) is not None:
                charge.enter_context(closing(claim))
            # Before anything starts, so that other processes find the run.
            record.save(folder.path)
        except BaseException:
            # Without its record, it could only hide the job's last run.
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
        plan = record.plan
        caller.observer.on_event(events.RunLaunched(name, plan, str(folder.path)))
        journal = Journal(folder.journal)
        journal.write(begun, events.RunStarted(plan.host_names))
        found = revision(os.fsencode(tree.source)) if tree is not None else None
        if found is not None:
            journal.write(begun, events.CodeKnown(decode(Revision, found, "code")))
        with listening(folder, caller.control):
            yield record, folder


@contextmanager
def earlier_run(record: Record, folder: RunFolder, caller: Caller) -> Iterator[RunFolder]:
    """Continue a run that this process has claimed: only new output is shown, and a stop that was
    requested earlier is requested again. Provides the folder of the current attempt."""
    folder = replace(folder, attempt=record.attempt)
    plan = record.plan
    caller.observer.on_event(events.RunAttached(record.run, plan, str(folder.path)))
    journal = Journal(folder.journal)
    known = ObservedRun.read(folder).attempt
    if known.number < record.attempt:
        # The last launcher was killed after it saved the record of this attempt. Without this
        # event, what hosts reported of the attempt before would count as reports of this one.
        journal.write(time.time(), events.NextAttempt(record.attempt, plan.host_names))
        known = ObservedAttempt(record.attempt)
    journal.write(time.time(), events.LauncherAttached())
    for stream, size in folder.sizes(plan).items():
        caller.observer.skip(stream, size)
    if not caller.control.interrupted and known.stop_reason:
        caller.control.stop(known.stop_reason)
    with listening(folder, caller.control):
        yield folder


def files_to_send(request: Request, spec: ClusterFile, control: Control) -> Tree | None:
    """The files of ``job.sync``; None without it. Raises DtrainError if they cannot be read, do not
    include the script, or if ``control`` stops the launch."""
    sync = spec.job.sync
    if sync is None:
        return None
    source = local_folder(sync.source, request.base)
    tree = scan(source, sync.exclude, lambda: control.interrupted)
    script = os.path.normpath(spec.job.script or "/")
    if request.check and not script.startswith(("/", "~")) and not tree.has(script):
        alike = Path(script).suffix
        close = nearest(script, (one.path for one in tree.files if one.path.endswith(alike)))
        raise UsageError(
            f"{request.place('job.script')}: job.script: {tree.source} has no {spec.job.script}"
            " that would be sent",
            hint=(f"did you mean {shown(close)}? " if close else "")
            + "job.script is a path in job.sync.source, and job.sync.exclude must not match it"
            " (`--no-check` launches without it)",
        )
    return tree
