"""Report the progress of training to the launcher.

Events are JSON lines. Each process appends them to a file in the run's folder on its host
(``DTRAIN_RUN_DIR``), which the launcher follows. Without dtrain there is no such folder, and
reports have no effect.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any, SupportsFloat

from dtrain.runtime.steps import BETWEEN_EVENTS, StepRecorder

MAX_METRICS, MAX_METRIC_NAME = 32, 64
"""Limits of the launcher for one report."""


def tell(kind: str, **body: Any) -> None:
    """Send the launcher an event, such as the port of a TensorBoard."""
    folder = os.environ.get("DTRAIN_RUN_DIR")
    if not folder:
        return
    line = json.dumps({"event": kind, "time": time.time(), **body}) + "\n"
    # A full disk, or a pipe in place of the file, must not end or block training.
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        flags |= os.O_NONBLOCK | os.O_NOFOLLOW
        fd = os.open(f"{folder}/{process_name()}.progress", flags, 0o600)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)


class _StepEvents:
    """The events about optimizer steps: not more than one in `BETWEEN_EVENTS` seconds."""

    def __init__(self) -> None:
        self._tokens = 0
        self._last = float("-inf")

    def add(
        self, step: int, total: int | None, loss: SupportsFloat | None, tokens: int, more: Any
    ) -> None:
        self._tokens += tokens
        now = time.monotonic()
        if now - self._last < BETWEEN_EVENTS and step != total:
            return
        self._last = now
        # Only now, because reading a loss from a GPU waits for the step to finish.
        metrics = {
            name[:MAX_METRIC_NAME]: _number(value)
            for name, value in list(more.items())[:MAX_METRICS]
        }
        tell(
            "progress",
            step=step,
            total=total,
            loss=None if loss is None else _number(loss),
            tokens=self._tokens or None,
            metrics=metrics,
        )


def _number(value: Any) -> float:
    # A loss that has a gradient: torch warns about a plain conversion.
    return float(value.detach() if hasattr(value, "detach") else value)


_step_events = _StepEvents()
steps = StepRecorder(tell)
"""The steps of this process."""


def progress(
    step: int,
    *,
    total: int | None = None,
    loss: SupportsFloat | None = None,
    tokens: int = 0,
    compute_seconds: float | None = None,
    data_seconds: float | None = None,
    **metrics: SupportsFloat,
) -> None:
    """Report that optimizer step ``step`` (counted from 1) is done.

    ``total`` is the total number of steps and gives the remaining time. ``tokens`` is the number of
    tokens in this step over all ranks; images or other samples work too. ``loss`` and ``metrics``
    may be tensors with one element. They are read only when an event is due, at most twice a second
    and at the last step. At most 32 metrics are reported, with the first 64 characters of their
    names.

    If every rank reports every step, the launcher names ranks that hang. If each also reports
    ``compute_seconds``, how long it computed before it waited for the others, and ``data_seconds``,
    how long it waited for data, the launcher names slow ranks. `dtrain.runtime.torch` measures all
    this by itself.
    """
    steps.report(step, compute_seconds, data_seconds)
    _step_events.add(step, total, loss, tokens, metrics)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Report that this process waits for ``data``, or that it must ``save`` or ``load`` a
    checkpoint, in a ``with`` statement. `dtrain report` shows how long a run did so.

    The functions of `dtrain.runtime.torch` and `dtrain.runtime.tensorflow` that do this report it
    by themselves. Raises ValueError for another name.
    """
    with steps.phase(name):
        yield


def process_name() -> str:
    """``rank-3``, or a TensorFlow task's role and index such as ``chief-0``."""
    if "RANK" in os.environ:
        return f"rank-{int(os.environ['RANK'])}"
    try:
        task = json.loads(os.environ.get("TF_CONFIG", "{}"))["task"]
        return f"{task['type']}-{int(task['index'])}"
    except (ValueError, KeyError, TypeError):
        return "worker-0"
