"""Notifies people and programs of the end of a run, or of a restart: ``notify`` in the file.

A notification never changes how a run ends: it runs in its own thread for `LIMIT` seconds at most,
and its failure is a notice.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from dtrain.failures.cause import Report
from dtrain.runs import events
from dtrain.runs.folder import RunFolder
from dtrain.runs.observed import ObservedRun
from dtrain.runs.request import Request
from dtrain.session.reporting.notify_program import LIMIT, NotifyError, run
from dtrain.session.reporting.recorder import Recorder
from dtrain.spec.model import Notification

SCHEMA = 1


class Notifications:
    """Sends the notifications of one run, each once."""

    def __init__(
        self,
        request: Request,
        folder: RunFolder,
        recorder: Recorder,
        secrets: Mapping[str, str],
    ) -> None:
        self._spec = request.spec()
        self._base = request.base
        self._sent = ObservedRun.read(folder).notified
        self._recorder = recorder
        self._secrets = secrets
        self._lock = threading.Lock()
        self._pending: dict[threading.Thread, tuple[str, float]] = {}

    def send(self, event: Notification, attempt: int, report: Report) -> None:
        """Begin to send a notification, if the file asks for it and no other process has sent it.
        Returns at once."""
        notify, this = self._spec.notify, events.Notified(event, attempt)
        # A run that nobody follows needs its user as much as one that has failed. Each launcher of
        # an attempt can leave it.
        unattended = event == "unattended"
        wanted = "failed" if unattended else event
        if notify is None or wanted not in notify.on or (this in self._sent and not unattended):
            return
        self._sent.add(this)
        self._recorder.record(this)
        body = json.dumps(document(event, self._spec.name, attempt, report)).encode()
        if notify.command:
            self._begin("notify.command", lambda: run(notify.command, self._base, body))
        if notify.webhook is None:
            return
        if url := self._secrets.get(notify.webhook):
            # HTTP is slow to import, and few launches need it.
            from dtrain.session.reporting.webhook import post

            self._begin("notify.webhook", lambda: post(url, body))
        else:
            self._recorder.notice(
                f"notify.webhook: {notify.webhook} is not set in this environment"
            )

    def close(self) -> None:
        """Wait for notifications, until their limit. No notice follows."""
        for thread, (what, deadline) in list(self._pending.items()):
            thread.join(max(0.0, deadline - time.monotonic()))
            self._end(thread, f"{what}: no answer within {LIMIT:g} s")

    def _begin(self, what: str, act: Callable[[], None]) -> None:
        def work() -> None:
            problem = ""
            try:
                act()
            except NotifyError as error:
                problem = f"{what}: {error}"
            except Exception as error:  # noqa: BLE001 - it must not end the run; may contain the URL
                problem = f"{what}: {type(error).__name__}"
            self._end(threading.current_thread(), problem)

        thread = threading.Thread(target=work, name="dtrain-notify", daemon=True)
        self._pending[thread] = what, time.monotonic() + LIMIT
        try:
            thread.start()
        except RuntimeError as error:  # too many threads
            self._end(thread, f"{what}: {error}")

    def _end(self, thread: threading.Thread, problem: str) -> None:
        """Report a problem, unless the notification has ended before."""
        with self._lock:
            if self._pending.pop(thread, None) is not None and problem:
                self._recorder.notice(problem)


def document(event: Notification, name: str, attempt: int, report: Report) -> dict[str, Any]:
    """The report for programs. Chat services show ``text``, a summary in one line."""
    return {
        "schema": SCHEMA,
        "event": event,
        "run": report.run,
        "name": name,
        "attempt": attempt,
        "text": f"{report.run} {event}: {report.reason}",
        **report.as_json(),
    }
