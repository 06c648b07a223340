"""Where the workers of a run are, for users and programs. Pure."""

from __future__ import annotations

from typing import Any

from dtrain.failures.cause import workers_on
from dtrain.framing import clean
from dtrain.runs.events import StacksReported
from dtrain_cli.views.document import document

SCHEMA = 1


def text(found: StacksReported, *, full: bool) -> str:
    """A line for each place; with ``full``, the stack below it."""
    lines = []
    for group in found.groups:
        lines.append(f"{workers_on(group.workers)}: in {group.place}")
        if full:
            lines += [f"    {frame}" for frame in group.frames]
    lines += found.notes
    return "".join(f"{clean(line)}\n" for line in lines or ["no worker has reported a stack"])


def as_json(run: str, found: StacksReported) -> str:
    return document({"schema": SCHEMA, "run": run, **body(found)})


def body(found: StacksReported) -> dict[str, Any]:
    groups = [
        {
            "workers": [{"host": host, "worker": label} for label, host in group.workers],
            "place": group.place,
            "frames": group.frames,
        }
        for group in found.groups
    ]
    return {"groups": groups, "notes": found.notes}
