"""Error files and logs of failed processes."""

from __future__ import annotations

import json
import os

from dtrain.node.agent.wire import MAX_TRACEBACK, shown
from dtrain.node.agent.worker_files import integer, read_regular

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from dtrain.node.agent.wire import Json

MAX_ERROR_FILE = 1 << 20
MAX_TIME = 1e11
"""Seconds since the epoch, in the year 5138."""
FULL = 64 << 10
"""Bytes that a full disk may have left: too few for what a failing worker writes."""


def error_report(path: bytes, most: int = MAX_TRACEBACK) -> Json | None:
    """A worker's error file (the format of torch's `@record`), with texts cut to ``most``
    characters. None if there is no such file."""
    data = read_regular(path, MAX_ERROR_FILE)
    if not data:
        return None
    report: Json = {"message": "", "traceback": "", "time": None}
    try:
        body = json.loads(data, parse_int=integer)
        message = body["message"] if isinstance(body, dict) and "message" in body else body
        if isinstance(message, dict):
            extra = message.get("extraInfo") or {}
            report["message"] = str(message.get("message", ""))
            report["traceback"] = str(extra.get("py_callstack", ""))
            stamp = extra.get("timestamp")
        else:
            report["message"] = str(message)
            stamp = body.get("timestamp") if isinstance(body, dict) else None
        report["time"] = written = _a_time(os.lstat(path).st_mtime)
        # torch's time has whole seconds, too coarse to order failures. The file's time is better,
        # unless torchrun has copied the file.
        if stamp is not None and not 0 <= written - _a_time(stamp) < 2:
            report["time"] = float(stamp)
    except (ValueError, TypeError, AttributeError, OSError, RecursionError, MemoryError):
        if not report["message"]:
            report["message"] = shown(data)
    report["message"] = report["message"][: most // 4]
    report["traceback"] = _without_middle(report["traceback"], most)
    return report


def _a_time(value: Any) -> float:
    time = float(value)
    if not 0 <= time < MAX_TIME:
        raise ValueError("not a time")
    return time


def full_disk(folder: bytes) -> Json | None:
    """The report of a worker that could not write one; None if the run's disk has room."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    if disk.f_bavail * disk.f_frsize > FULL:
        return None
    return {"message": "No space left on device: the disk with the run's folder is full"}


def _without_middle(text: str, most: int) -> str:
    """The first and last characters: deep frames push a traceback's end out of sight, a long
    message its beginning."""
    if len(text) <= most:
        return text
    mark = "\n  [...]\n"
    return text[: most // 2 - len(mark)] + mark + text[-(most // 2) :]


def tail_of(path: bytes, lines: int) -> str:
    """The last lines of a log, for a message."""
    data = (read_regular(path, 4096, -4096) or b"").strip()
    return "\n".join(shown(line) for line in data.splitlines()[-lines:])


FAILURE = (
    rb"rank\s*: (\d{1,6}) \(local_rank: (\d{1,6})\)\s+exitcode\s*: (-?\d{1,9}) \(pid: (\d{1,9})\)"
)
"""One entry of the summary that torchrun writes to stderr."""
SHORT_TRACEBACK = 4 << 10
