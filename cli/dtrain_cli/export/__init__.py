"""Exports a run while it is watched: OpenMetrics over HTTP or in a file, and TensorBoard scalars.

`Exports` is an observer. Observers return at once, so it only notes what it gets; a thread computes
the goodput and writes the files. A failure to export never ends the run.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from dtrain.diagnostics import DtrainError, UsageError
from dtrain.launchplan.plan import LaunchPlan
from dtrain.runs import events
from dtrain.runs.folder import RunFolder
from dtrain.runs.goodput import goodput
from dtrain.runs.journal import JournalReader
from dtrain.runs.progress import Pace, Progress, Representative
from dtrain.session.reporting.observer import Observer
from dtrain_cli.export.metrics_server import serve
from dtrain_cli.export.scalars import Scalars, check_scalars
from dtrain_cli.files import METRICS, writable, write_text
from dtrain_cli.views import open_metrics
from dtrain_cli.views.open_metrics import Metrics

PERIOD = 5.0
"""Seconds between two writes of the files."""
BUSY = 0.02
"""Most part of a CPU that the computation of the goodput takes."""


class Exports(Observer):
    """Use as a context manager around the run."""

    def __init__(
        self, port: str | None = None, file: Path | None = None, scalars: Path | None = None
    ) -> None:
        """``port`` is ``[ADDRESS:]PORT``, ``scalars`` a folder for TensorBoard. Raises UsageError
        if something cannot be exported."""
        self._metrics = Metrics()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._pace, self._representative = Pace(), Representative()
        self._journal: JournalReader | None = None
        self._records: list[tuple[float, events.JournalEvent]] = []
        self._file, self._folder = file, scalars
        self._scalars: Scalars | None = None
        if scalars is not None:
            check_scalars(scalars)
        if file is not None:
            writable(file, METRICS)
            write_text(file, "# EOF\n", public=True)
        self._server = serve(port, self._text) if port is not None else None
        self._threads = [threading.Thread(target=self._tick, daemon=True)]
        if self._server is not None:
            self._threads.append(threading.Thread(target=self._server.serve_forever, daemon=True))

    @property
    def address(self) -> str:
        """Where the metrics can be read; empty without a port."""
        if self._server is None:
            return ""
        host, port = self._server.server_address[:2]
        name = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{name}:{port}/metrics"

    def __enter__(self) -> Exports:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        for thread in self._threads:
            thread.join()

    def on_event(self, event: events.RunEvent) -> None:
        with self._lock:
            self._metrics.known.add(time.time(), event)
            match event:
                case events.RunLaunched(run, plan, folder) | events.RunAttached(run, plan, folder):
                    self._begin(run, plan, folder)
                case events.AttemptPlanned():
                    self._metrics.progress.clear()
                    self._metrics.samples.clear()
                    self._metrics.tokens_per_second = None
                    self._pace, self._representative = Pace(), Representative()
                case events.Sampled(host, sample):
                    self._metrics.samples[host] = sample
                case events.ProgressReported(_, report):
                    self._progress(report)

    def _begin(self, run: str, plan: LaunchPlan, folder: str) -> None:
        if self._journal is not None:  # the run that it watched until now, taken over
            return
        self._metrics.run = run
        self._journal = JournalReader(RunFolder(Path(folder)).journal)
        if self._folder is not None:
            self._scalars = Scalars(self._folder / run)

    def _progress(self, report: Progress) -> None:
        self._metrics.progress[report.process] = report
        if not self._representative.reports(report):
            return
        self._pace.add(report)
        self._metrics.tokens_per_second = self._pace.tokens_per_second
        if self._scalars is None:
            return
        values = {
            "loss": report.loss,
            "tokens_per_second": self._pace.tokens_per_second,
            "goodput": self._metrics.goodput.share if self._metrics.goodput else None,
            **report.metrics,
        }
        known = {name: value for name, value in values.items() if value is not None}
        self._scalars.add(report, known)

    # Its threads ---------------------------------------------------------------------------------

    def _text(self) -> str:
        with self._lock:
            return open_metrics.text(self._metrics)

    def _tick(self) -> None:
        due = 0.0
        over = False
        while not over:
            over = self._over.wait(PERIOD)
            begin = time.monotonic()
            if begin >= due or over:
                self._count_goodput()
                due = begin + (time.monotonic() - begin) / BUSY
            if self._file is not None:
                with contextlib.suppress(UsageError):  # the next write may succeed
                    write_text(self._file, self._text(), public=True)
            if self._scalars is not None:
                self._scalars.write()

    def _count_goodput(self) -> None:
        if self._journal is None:
            return
        with contextlib.suppress(DtrainError):
            self._records += self._journal.read()
            found = goodput(self._records, time.time())
            with self._lock:
                self._metrics.goodput = found
