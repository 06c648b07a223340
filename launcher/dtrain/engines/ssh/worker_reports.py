"""Handles reports of one host's workers through `dtrain.runtime`: progress and TensorBoard."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dtrain.engines.ssh.context import AttemptContext
from dtrain.engines.ssh.forward import Forward
from dtrain.launchplan.plan import HostPlan
from dtrain.runs import events
from dtrain.transport.contract import Connection


class WorkerReports:
    def __init__(
        self, context: AttemptContext, part: HostPlan, connection: Callable[[], Connection | None]
    ) -> None:
        """``connection`` returns the host's current connection, for TensorBoard."""
        self._context = context
        self._host = part.host
        self._connection = connection
        self._tensorboard: Forward | None = None
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Reports may still arrive in the thread that reads them."""
        with self._lock:
            self._closed = True
            if self._tensorboard is not None:
                self._tensorboard.close()

    def add(self, file: str, fields: Any) -> bool:
        """As `ProgressReports.add`."""
        active = self._context.progress.add(self._host.name, file, fields)
        with suppress(KeyError, TypeError, ValueError, OverflowError, AttributeError):
            wanted = "DTRAIN_TENSORBOARD" in self._context.plan.job.env
            if wanted and self._tensorboard is None and fields.get("event") == "tensorboard":
                with self._lock:
                    if not self._closed:
                        self._show_tensorboard(int(fields["port"]))
        return active

    def _show_tensorboard(self, port: int) -> None:
        if not 1024 <= port <= 65535:
            return
        context, host = self._context, self._host.name
        if self._host.transport != "local":
            try:
                self._tensorboard = Forward(port, self._connection)
            except OSError as error:
                context.recorder.notice(f"cannot show {host}'s TensorBoard here: {error}")
                return
            port = self._tensorboard.port
        text = f"TensorBoard of {host}: http://127.0.0.1:{port}/"
        context.recorder.record(events.TensorBoardAddress(host, text))
