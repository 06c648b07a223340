"""The last traceback or the last lines of a process's stderr. Pure."""

from __future__ import annotations

import re

from dtrain.framing import LineFramer, clean

PLAIN_LINES = 20
"""Lines shown if there is no traceback."""
_MESSAGE_LINES = 20
_STALE_AFTER = 60
"""A traceback with more other lines than this after it is not how the process ended."""

_PREFIX = re.compile(
    r"\[rank\d+\]: ?"  # torch, once a process group exists
    r"|[EWIF]\d{4} \d\d:\d\d:\d\d(?:\.\d+)? +\d+ [^\]]*\] ?"  # torch's own log lines
)
_HEADER = re.compile(
    r"(?:  \+ Exception Group )?Traceback \(most recent call last\):|Fatal Python error: "
)
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_NATIVE_FRAME = re.compile(r"frame #\d+: |<omitting python frames>|\s+@ +0x")
"""Lines of a native stack trace, which would hide the message."""
_NATIVE_REPORT = re.compile(r"terminate called |\[?[EF]\d{3,4} \d\d:\d\d:|F\d{4} ")
_LOG_LINE = re.compile(r"\[?[EWIF]\d{2,4}[ :]|\d{4}-\d\d-\d\d[ T]\d\d:|\[\w+ \d|\w+: WARNING")


def last_words(stderr: bytes) -> str:
    """The last chain of Python tracebacks in ``stderr``, or else its last lines.

    Without the prefixes that torch writes before each line, and without anything that is not
    text. Returns ``""`` for a process that wrote nothing.
    """
    framer = LineFramer()
    raw = [clean(line).rstrip() for line in framer.feed(stderr) + framer.flush()]
    lines = [_PREFIX.sub("", line, count=1) if _PREFIX.match(line) else line for line in raw]
    headers = [number for number, line in enumerate(lines) if _HEADER.match(line)]
    if headers:
        end = _end(raw, lines, headers[-1])
        if sum(1 for line in raw[end:] if line) <= _STALE_AFTER:
            last = lines[_start(lines, headers) : end]
            return "\n".join(line for line in last if not _NATIVE_FRAME.match(line))
    said = [line for line in lines if line and not _NATIVE_FRAME.match(line)]
    return "\n".join(said[-PLAIN_LINES:])


def _start(lines: list[str], headers: list[int]) -> int:
    """The first line of the chain that ends with the last traceback."""
    start = headers[-1]
    if lines[start].startswith("Fatal Python error"):
        # The interpreter reports where it was; the library that gave up said why just before.
        near = range(max(0, start - _STALE_AFTER), start)
        return next((number for number in near if _NATIVE_REPORT.match(lines[number])), start)
    for earlier in reversed(headers[:-1]):
        before = [line for line in lines[earlier:start] if line]
        if not before or before[-1] not in _CHAINED:
            break
        start = earlier
    return start


def _end(raw: list[str], lines: list[str], header: int) -> int:
    """The line after a traceback's message, which may have several lines."""
    prefix = _PREFIX.match(raw[header])
    if prefix:
        # Every line of it has the prefix, except empty ones.
        end = header + 1
        mark = prefix[0].split()[0]
        for number in range(header + 1, len(raw)):
            if raw[number] and not raw[number].startswith(mark):
                break
            if raw[number]:
                end = number + 1
        return end
    end = header + 1
    if lines[header].startswith("Fatal Python error"):
        while end < len(lines) and (
            not lines[end] or lines[end].startswith(("  ", "Current thread", "Thread", "Python"))
        ):
            end += 1
        return end
    while end < len(lines) and (lines[end].startswith((" ", "\t"))):
        end += 1
    # TensorFlow writes "Graph execution error:", empty lines, and then the error itself.
    goes_on = end < len(lines) and lines[end].endswith("Graph execution error:")
    end += 1
    left = _MESSAGE_LINES
    while left and end < len(lines) and (lines[end] or goes_on):
        if _LOG_LINE.match(lines[end]):
            break
        # A DataLoader's message contains another process's traceback of any length.
        left -= not lines[end].startswith("  ")
        end += 1
    end = min(end, len(lines))
    while not lines[end - 1]:
        end -= 1
    return end
