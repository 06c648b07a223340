"""A run as plain lines: for pipes, files and terminals that cannot move the cursor."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import groupby
from operator import itemgetter

from dtrain.checks import Finding, Severity
from dtrain.failures.cause import Report
from dtrain.failures.stalls import GOES_ON
from dtrain.failures.stragglers import RECOVERED
from dtrain.framing import LIMIT, clean, clean_all, prefixed
from dtrain.launchplan.plan import LaunchPlan
from dtrain.runs import events
from dtrain.runs.log_store import Stream
from dtrain.runs.progress import Progress
from dtrain.runs.shown_state import ShownState
from dtrain.session.reporting.feed import RunReceiver, StreamKey
from dtrain.wording import counted
from dtrain_cli.views import names
from dtrain_cli.views.bars import Bars
from dtrain_cli.views.folding import LineFolder
from dtrain_cli.views.outlet import Outlet
from dtrain_cli.views.progress import BETWEEN_LINES, ProgressLine
from dtrain_cli.views.report import render

_MAX_WARNINGS = 6
"""Warnings that a launch shows; `dtrain check` shows all."""
_MAX_UNREACHABLE = 3
"""Unreachable hosts that each get a notice; for more, one notice follows."""


class Plain(RunReceiver):
    """Prints the workers' stdout on stdout and their stderr on stderr, with ``[host rank]`` before
    each line, and dtrain's own notices on stderr."""

    limit = LIMIT

    def __init__(
        self, out: Outlet, err: Outlet, *, fold: bool, timestamps: bool, color: tuple[bool, bool]
    ) -> None:
        """``timestamps``: whether to show when a line arrived. ``color``: whether to color stdout
        and stderr."""
        self.timed = timestamps
        self._out = out
        self._err = err
        self._color = dict(zip(("stdout", "stderr"), color, strict=True))
        self._folder: LineFolder[tuple[str, str]] | None = LineFolder() if fold else None
        self._bars: Bars[Stream] = Bars()
        self._buffer: list[tuple[Outlet, str]] = []
        self._second: int | None = None
        self._stamp = f"{_timestamp(None)} " if timestamps else ""
        """For what arrived in that second."""
        self._stamps: dict[Stream, str] = {}
        """For lines that have not ended."""
        self._attempt = 1
        """Of the output that was shown last."""
        self._widths = (0, 0)
        self._workers = 0
        self._hosts = 0
        self._starting: set[str] = set()
        self._unreachable: set[str] = set()
        self._progress_line = ProgressLine()
        self._last_progress, self._last_text = float("-inf"), ""

    def on_event(self, event: events.RunEvent) -> None:
        match event:
            case events.RunLaunched(run, plan, folder):
                self._expect(plan)
                self._notice(f"run {run}, logs in {names.path(folder)}")
                self._notice(f"starting {self._count(plan)}")
            case events.RunAttached(run, plan, folder):
                self._know(plan)
                self._notice(f"run {run}: {self._count(plan)}, logs in {names.path(folder)}")
            case events.AttemptPlanned(plan):
                self._unreachable.clear()
                self._progress_line, self._last_text = ProgressLine(), ""
                self._expect(plan)
                self._notice(f"attempt {plan.attempt}: starting {self._count(plan)}")
            case events.HostsPlanned(plan):
                self._expect(plan)
                self._notice(self._count(plan))
            case events.OutputFollows(plan):
                self._know(plan)
                self._attempt = 1  # it is that of all attempts
            case events.HostState(host, state):
                self._host_state(host, state)
            case events.Findings(findings):
                self._findings(findings)
            case events.NoticeShown(text) | events.TensorBoardAddress(_, text):
                self._notice(text)
            case events.ProgressReported(_, report, followed):
                self._progress(report, followed=followed)
            case events.StragglersChanged(slow):
                self._notice(str(slow or RECOVERED))
            case events.StallChanged(stall):
                self._notice(f"{stall}; collecting stacks" if stall else GOES_ON)

    def _expect(self, plan: LaunchPlan) -> None:
        """The workers of ``plan`` start."""
        self._starting = set(plan.host_names)
        self._know(plan)

    def _know(self, plan: LaunchPlan) -> None:
        self._attempt = plan.attempt
        self._progress_line.expect(plan)
        self._workers = plan.world_size
        self._hosts = len(plan.hosts)
        labels = [len(process.label) for host in plan.hosts for process in host.processes]
        self._widths = (max(map(len, plan.host_names)), max(labels, default=0))

    def _count(self, plan: LaunchPlan) -> str:
        """``4 workers on 2 hosts (node0, node1)``."""
        hosts = plan.host_names
        count = f"{counted(self._workers, 'worker')} on {counted(len(hosts), 'host')}"
        return f"{count} ({names.brief(hosts)})" if plan.hosts_known else count

    def _host_state(self, host: str, state: str) -> None:
        if state == ShownState.RUNNING and host in self._starting:
            self._starting.remove(host)
            if not self._starting:
                self._notice(f"{counted(self._workers, 'worker')} started")
        elif state == ShownState.UNREACHABLE and host not in self._unreachable:
            self._unreachable.add(host)
            if len(self._unreachable) <= _MAX_UNREACHABLE:
                self._notice(f"{host} cannot be reached; its workers keep running, reconnecting")
            elif len(self._unreachable) == _MAX_UNREACHABLE + 1:
                self._notice(
                    "more hosts cannot be reached; their workers keep running, reconnecting"
                )
        elif host in self._unreachable and state in (ShownState.RUNNING, ShownState.ENDED):
            self._unreachable.remove(host)
            if not self._unreachable:
                self._notice("all hosts are reachable again")

    def _findings(self, findings: Sequence[Finding]) -> None:
        # Few launches have findings, so import their view only here.
        from dtrain_cli.views.findings import brief, entry
        from dtrain_cli.views.paper import Paper

        columns, _ = self._err.size()
        paper = Paper(columns, color=self._color["stderr"], unicode=True)
        errors = [finding for finding in findings if finding.severity is Severity.ERROR]
        for finding in errors:
            self._put("stderr", "\n" + paper.draw(entry(finding, self._hosts, paper)))
        warnings = [finding for finding in findings if finding not in errors]
        if errors and warnings:
            self._put("stderr", "\n")
        for finding in warnings[:_MAX_WARNINGS]:
            self._notice(brief(finding, self._hosts))
        if warnings:
            more = len(warnings) - _MAX_WARNINGS
            others = f"{counted(more, 'more warning')}; " if more > 0 else ""
            self._notice(f"{others}`dtrain check FILE` shows the remedies")

    def _notice(self, text: str) -> None:
        head = names.paint("dtrain:", "bold") if self._color["stderr"] else "dtrain:"
        for line in text.splitlines():
            self._put("stderr", f"{head} {clean(line)}\n")

    def lines(self, stream: Stream, text: str, partial: str, second: int | None) -> None:
        if stream.attempt != self._attempt:
            self._fold(math.inf)
            self._attempt = stream.attempt
            self._notice(f"output of attempt {stream.attempt}")
        if self.timed and second != self._second:
            self._second, self._stamp = second, f"{_timestamp(second)} "
        stamp = self._stamp
        if partial or self._bars:
            self._stamps[stream] = stamp
            self._bars.update(time.monotonic(), stream, partial, ended=bool(text))
        if not text:
            return
        if stamp:
            text = prefixed(text, stamp)
        if self._folder is None:
            self._print(stream.fd, [(stream.host, stream.label)], text)
            return
        now = time.monotonic()
        self._folder.add(now, (stream.host, stream.label), stream.fd, text)
        self._fold(now)

    def _progress(self, report: Progress, *, followed: bool) -> None:
        due = report.time >= self._last_progress + BETWEEN_LINES or report.step == report.total
        if self._progress_line.add(report) and due and not followed:
            self._last_progress = report.time
            text = self._progress_line.text
            if text != self._last_text:  # all ranks report the last step
                self._notice(text)
            self._last_text = text

    def flush(self, now: float) -> None:
        for stream, text in self._bars.take(now):
            line = f"{self._stamps[stream]}{text}\n"
            self._print(stream.fd, [(stream.host, stream.label)], line)
        self._fold(now)
        self._write("", "")

    def next_flush(self, now: float) -> float | None:
        folded = self._folder.due if self._folder is not None else None
        due = min((time for time in (folded, self._bars.due) if time is not None), default=None)
        return None if due is None else max(0.0, due - now)

    def suspend(self) -> None:
        self._fold(math.inf)
        self._write("", "")

    def finished(self, report: Report, paths: Mapping[StreamKey, str]) -> None:
        self.suspend()
        columns = self._err.size()[0] if self._err.terminal else None
        self._put("stderr", render(report, paths, color=self._color["stderr"], columns=columns))
        self._write("", "")

    def _fold(self, now: float) -> None:
        if self._folder is not None:
            for folded in self._folder.take(now):
                self._print(folded.kind, folded.sources, folded.text)

    def _print(self, fd: str, sources: list[tuple[str, str]], text: str) -> None:
        if len(sources) == 1:
            host, label = sources[0]
        else:
            sources = sorted(sources, key=_order)
            host = names.brief(dict.fromkeys(host for host, _ in sources))
            label = names.labels(label for _, label in sources)
        head = names.prefix(host, label, *self._widths)
        if self._color[fd]:
            head = names.paint(head[:-1], names.color_of(*sources[0])) + " "
        self._put(fd, prefixed(clean_all(text, self._color[fd]), head))

    def _put(self, fd: str, text: str) -> None:
        self._buffer.append((self._out if fd == "stdout" else self._err, text))

    def _write(self, before: str, after: str) -> None:
        """Write the buffer, with ``before`` and ``after`` around it on stderr. Join neighbors that
        go to one stream into one write."""
        pieces = [(self._err, before), *self._buffer, (self._err, after)]
        self._buffer = []
        for outlet, neighbors in groupby(pieces, itemgetter(0)):
            if text := "".join(text for _, text in neighbors):
                outlet.write(text)


class Quiet(Plain):
    """Prints only dtrain's own notices and the report."""

    def lines(self, stream: Stream, text: str, partial: str, second: int | None) -> None:
        """The log files have them."""

    def on_event(self, event: events.RunEvent) -> None:
        if not isinstance(event, events.ProgressReported):
            super().on_event(event)


def _timestamp(second: int | None) -> str:
    """Seconds since the epoch as in RFC 3339, in this machine's time zone."""
    return "-" if second is None else datetime.fromtimestamp(second).astimezone().isoformat()


def _order(source: tuple[str, str]) -> tuple[int, str, str]:
    host, label = source
    return (int(label), host, label) if label.isdecimal() else (1 << 60, host, label)
