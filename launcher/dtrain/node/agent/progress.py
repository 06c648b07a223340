"""Reads the reports that workers write through `dtrain.runtime`: lines of JSON in files.

Any process of the job can write to these files.
"""

from __future__ import annotations

import os
import re

from dtrain.node.agent.wire import shown
from dtrain.node.agent.worker_files import Lines, decode, last_line, read_regular
from dtrain.node.files import listed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

    from dtrain.node.agent.wire import Json

MAX_REPORT = 16 << 10
"""Bytes of one line."""
MAX_PROGRESS_FILES = 4096
MAX_METRICS, MAX_METRIC_NAME = 32, 64
PROGRESS_FILE = rb"(?:rank|chief|worker|ps|evaluator)-\d{1,6}\.progress"
MAX_TIME = 1e11
"""Seconds since the epoch, in the year 5138."""
PHASES = ("data", "save", "load")
MAX_BLOCKS, MAX_SECONDS = 64, 1e7


def report_in(line: bytes | None) -> Json | None:
    """The known fields of one line; None if a field is missing or has another type."""
    body = decode(line) if line is not None else None
    try:
        if body is not None and body["event"] == "progress":
            return {
                "event": "progress",
                "time": a_time(body["time"]),
                "step": whole(body["step"]),
                "total": None if body["total"] is None else whole(body["total"]),
                "loss": None if body["loss"] is None else number(body["loss"]),
                "tokens": None if body["tokens"] is None else whole(body["tokens"]),
                "metrics": metrics_in(body["metrics"]),
            }
        if body is not None and body["event"] == "steps":
            return steps_in(body)
        if body is not None and body["event"] == "tensorboard":
            port = whole(body["port"])
            if port < 1 << 16:
                return {"event": "tensorboard", "time": a_time(body["time"]), "port": port}
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    return None


def steps_in(body: Json) -> Json:
    waits, blocks = body["waits"], body["blocks"]
    if waits not in (None, "", "ranks", "data") or len(blocks) > MAX_BLOCKS:
        raise ValueError("not a report of steps")
    return {
        "event": "steps",
        "time": a_time(body["time"]),
        "done": whole(body["done"]),
        "waits": waits,
        "group": whole(body["group"]),
        "blocks": [block_in(block) for block in blocks],
        "phases": phases_in(body.get("phases", {})),
    }


def phases_in(body: Any) -> dict[str, float]:
    return {name: seconds(body[name]) for name in PHASES if name in body}


def block_in(block: Any) -> list[Any]:
    number, step, compute, data, queued = block
    return [
        whole(number),
        seconds(step),
        None if compute is None else seconds(compute),
        seconds(data),
        seconds(queued),
    ]


def metrics_in(body: Any) -> dict[str, float]:
    metrics = {name: number(value) for name, value in body.items()}
    if len(metrics) > MAX_METRICS:
        raise ValueError("too many metrics")
    if not all(0 < len(name) <= MAX_METRIC_NAME and name.isprintable() for name in metrics):
        raise ValueError("not the name of a metric")
    return metrics


def number(value: Any) -> float:
    """Accepts infinity and NaN, which a loss may be. Raises TypeError for other types."""
    if type(value) not in (int, float):
        raise TypeError("not a number")
    return float(value)


def whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError("not a count")
    return int(value)


def seconds(value: Any) -> float:
    if not 0 <= number(value) < MAX_SECONDS:
        raise ValueError("not a duration")
    return float(value)


def a_time(value: Any) -> float:
    time = number(value)
    if not 0 <= time < MAX_TIME:
        raise ValueError("not a time")
    return time


class ProgressFiles:
    """The progress files of a run's folder, read from ``offsets`` on."""

    def __init__(self, folder: bytes, offsets: Json, attached: bool) -> None:
        self._folder, self._offsets, self._attached = folder, offsets, attached
        self._followed: dict[bytes, Lines] = {}
        self._reported: set[bytes] = set()
        self.notices: list[str] = []
        """Problems with the files, each reported once."""
        self.advanced = False
        """Whether the last `read` found new data, valid or not. There may be more."""

    def read(self, over: bool = False) -> Iterator[tuple[str, int, Json]]:
        """The new reports: file name, offset of the next line, and fields.

        If the run is ``over``, only the last reports matter: skip to the end of large files.
        """
        self.advanced = False
        for file in listed(self._folder):
            if not re.fullmatch(PROGRESS_FILE, file):
                continue
            path = os.path.join(self._folder, file)
            lines = self._followed.get(file)
            if lines is None:
                if len(self._followed) >= MAX_PROGRESS_FILES:
                    continue
                start = self._offsets.get(shown(file), 0)
                if shown(file) not in self._offsets and self._attached:
                    # A launcher that attaches needs the current state, not the history.
                    start = last_line(path, MAX_REPORT)
                    yield from self._tensorboards(file, path, start)
                lines = self._followed[file] = Lines(path, start, MAX_REPORT)
            if over:
                lines.skip_to_last(path)
            dropped, begun = 0, lines.offset
            found = lines.read()
            self.advanced |= lines.offset > begun
            for line, end in found:
                report = report_in(line)
                if report is not None:
                    yield shown(file), end, report
                else:
                    dropped += 1
            if dropped and file not in self._reported:
                self._reported.add(file)
                self.notices.append(
                    "%s: dropped %d line%s that dtrain.runtime does not write (too long, or not a"
                    " report)" % (shown(file), dropped, "s" if dropped > 1 else "")
                )

    def _tensorboards(
        self, file: bytes, path: bytes, start: int
    ) -> Iterator[tuple[str, int, Json]]:
        """The TensorBoards reported in the first MiB before ``start``."""
        data = read_regular(path, min(start, 1 << 20)) or b""
        for line in data.split(b"\n"):
            report = report_in(line) if b"tensorboard" in line and len(line) <= MAX_REPORT else None
            if report is not None and report["event"] == "tensorboard":
                yield shown(file), start, report
