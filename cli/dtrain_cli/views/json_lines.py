"""A run as JSON Lines on stdout, for programs.

Every object has ``"schema": 1`` and an ``event``: ``started`` (or ``attached``), ``host``,
``finding``, ``notice``, ``line``, ``progress``, ``stragglers``, ``stall``, ``stacks``, ``attempt``
and, last, ``finished``. If an engine chooses the hosts, their names are null until ``allocated``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dtrain.failures.cause import Report
from dtrain.framing import split
from dtrain.launchplan.plan import LaunchPlan
from dtrain.runs import events
from dtrain.runs.log_store import Stream
from dtrain.session.reporting.feed import RunReceiver, StreamKey
from dtrain_cli.views import stacks
from dtrain_cli.views.document import finite
from dtrain_cli.views.outlet import Outlet

SCHEMA = 1


class JsonLines(RunReceiver):
    limit = 1 << 20
    """Characters; longer lines are cut and marked as cut."""
    timed = True

    def __init__(self, out: Outlet) -> None:
        self._out = out
        self._buffer: list[str] = []

    def on_event(self, event: events.RunEvent) -> None:
        match event:
            case events.RunLaunched(run, plan, folder):
                self._begin("started", run, plan, folder)
            case events.RunAttached(run, plan, folder):
                self._begin("attached", run, plan, folder)
            case events.AttemptPlanned(plan):
                self._put("attempt", attempt=plan.attempt, hosts=_hosts(plan))
            case events.HostsPlanned(plan):
                self._put("allocated", hosts=_hosts(plan))
            case events.HostState(host, state, detail):
                self._put("host", host=host, state=state, detail=detail)
            case events.Findings(findings):
                for finding in findings:
                    self._put("finding", **finding.as_json())
            case events.NoticeShown(text) | events.TensorBoardAddress(_, text):
                self._put("notice", text=text)
            case events.ProgressReported(host, report, followed=False):
                self._put("progress", host=host, **finite(asdict(report)))
            case events.StragglersChanged(slow):
                self._put("stragglers", found=None if slow is None else asdict(slow))
            case events.StallChanged(stall):
                self._put("stall", found=None if stall is None else asdict(stall))
            case events.StacksReported():
                self._put("stacks", **stacks.body(event))

    def _begin(self, event: str, run: str, plan: LaunchPlan, folder: str) -> None:
        self._put(event, run=run, name=plan.name, logs=folder, hosts=_hosts(plan))

    def lines(self, stream: Stream, text: str, partial: str, second: int | None) -> None:
        """Print each line as the worker wrote it, with escape sequences, which JSON escapes."""
        if not text:
            return
        origin = {
            "schema": SCHEMA,
            "event": "line",
            "host": stream.host,
            "role": stream.role,
            "index": stream.index,
            "rank": stream.rank,
            "stream": stream.fd,
            "time": second,
            "attempt": stream.attempt,
            "text": "",
        }
        # All these lines share every field but the text.
        head = json.dumps(origin)[: -len('""}')]
        self._buffer += [f"{head}{json.dumps(line)}}}\n" for line in split(text)]

    def flush(self, now: float) -> None:
        if self._buffer:
            text = "".join(self._buffer)
            self._buffer = []
            self._out.write(text)

    def suspend(self) -> None:
        self.flush(0.0)

    def finished(self, report: Report, paths: Mapping[StreamKey, str]) -> None:
        self._put("finished", **report.as_json())
        self.flush(0.0)

    def _put(self, event: str, **fields: Any) -> None:
        self._buffer.append(json.dumps({"schema": SCHEMA, "event": event, **fields}) + "\n")


def _hosts(plan: LaunchPlan) -> list[dict[str, Any]]:
    return [
        {
            "host": host.host.name if plan.hosts_known else None,
            "processes": [
                {"role": process.role, "index": process.index, "rank": process.rank}
                for process in host.processes
            ],
        }
        for host in plan.hosts
    ]
