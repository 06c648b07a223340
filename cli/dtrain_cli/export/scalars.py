"""Writes the scalars of a run for TensorBoard."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from io import BytesIO
from pathlib import Path
from socket import gethostname
from tempfile import TemporaryFile
from typing import Any

from dtrain.diagnostics import UsageError
from dtrain.runs.progress import Progress


class Scalars:
    """TensorBoard's file for one run. Its own writer has a thread, which ends with a traceback on
    the terminal at the first failure."""

    def __init__(self, folder: Path) -> None:
        name = f"events.out.tfevents.{int(time.time()):010d}.{gethostname()}.{os.getpid()}"
        self._path = folder / name
        self._lock = threading.Lock()
        self._records: list[bytes] = []
        self._size = 0
        """Bytes of the file that are whole records."""

    def add(self, report: Progress, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = Summary(value=scalars)
        record = _record(wall_time=report.time, step=report.step, summary=summary)
        with self._lock:
            self._records.append(record)

    def write(self) -> None:
        """Append what was added. A failure loses it; the next call may succeed."""
        with self._lock:
            records, self._records = self._records, []
        if not records:
            return
        if not self._size:
            records.insert(0, _record(wall_time=time.time(), file_version="brain.Event:2"))
        data = b"".join(records)
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # If all users may write to the folder, another one may have put a link there.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            with os.fdopen(os.open(self._path, flags, 0o666), "ab") as file:
                file.truncate(self._size)  # a failure may have left a part of a record
                file.write(data)
            self._size += len(data)


def _record(**fields: Any) -> bytes:
    """An event in the format of TensorBoard's files."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    record = BytesIO()
    RecordWriter(record).write(Event(**fields).SerializeToString())
    return record.getvalue()


def check_scalars(folder: Path) -> None:
    """Raise UsageError if no scalars can be written below ``folder``."""
    try:
        import tensorboard.compat.proto.event_pb2
        import tensorboard.summary.writer.record_writer  # noqa: F401
    except ImportError:
        raise UsageError(
            "--tensorboard-dir needs the package tensorboard", hint="pip install tensorboard"
        ) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(b"\n")
    except OSError as error:
        raise UsageError(
            f"--tensorboard-dir {folder}: cannot write: {error.strerror}",
            hint="name a folder that you can write to",
        ) from None
