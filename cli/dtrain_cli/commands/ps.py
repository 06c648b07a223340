"""`dtrain ps`: the runs of this machine, or one of them with its hosts."""

from __future__ import annotations

from dataclasses import replace

from dtrain.diagnostics import UsageError
from dtrain.logs.store import RunFolder
from dtrain.record import Record
from dtrain.session.status import RunStatus, status, statuses
from dtrain_cli.views import runs as view


def ps(run: str | None, *, json: bool, everything: bool) -> str:
    """Text for stdout."""
    if run is not None:
        folder = RunFolder.find(run)
        try:
            one = status(folder)
        except UsageError as error:
            hint = f"the output of its workers may still be in {folder.logs}"
            raise UsageError(error.message, hint=hint) from None
        if one.state == "unattended":
            one = _asked(one, Record.load(folder.path))
        return view.as_json([one]) if json else view.details(one)
    found = statuses()
    shown = found if everything else [one for one in found if one.active] or found[-5:]
    return view.as_json(shown) if json else view.table(shown, of=len(found))


def _asked(run: RunStatus, record: Record) -> RunStatus:
    """With what its hosts say: nobody else hears of them."""
    # A list of runs has no use for threads and transports.
    from dtrain.session.inquiry import ask
    from dtrain.transport.select import Transports

    transport = Transports(record.request.base)
    try:
        return replace(run, hosts=ask(record, run.hosts, transport))
    finally:
        transport.close()
