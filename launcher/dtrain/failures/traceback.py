"""The last traceback or the last lines of a process's stderr. Pure."""

from __future__ import annotations

import re

from dtrain.framing import LineFramer, clean, split

PLAIN_LINES = 20
"""Lines shown if there is no traceback."""
MESSAGE_LINES = 20
"""Lines of an exception's message that a report shows."""
_KEPT_LINES = 200
_KEPT_BYTES = 32 << 10
"""Bytes kept at each end of a longer stderr."""
STALE_AFTER = 60
"""A traceback with more other lines than this after it is not how the process ended."""

# Texts, which `re` compiles when a process has failed.
_PREFIX = (
    r"\A(?:\[rank\d+\]: ?"  # torch, once a process group exists
    r"|[EWIF]\d{4} \d\d:\d\d:\d\d(?:\.\d+)? +\d+ [^\]]*\] ?)"  # torch's own log lines
)
_HEADER = r"(?:  \+ Exception Group )?Traceback \(most recent call last\):|Fatal Python error: "
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
    # The ends of a message of multiprocessing: the process whose child wrote it fails next.
    "section in https://docs.python.org/3/library/multiprocessing.html",
    "is not going to be frozen to produce an executable.",
)
_IGNORED = "Exception ignored "
"""Begins the line above the traceback of an exception that nothing could catch, such as in
``__del__``: the process goes on."""
_CUT = r"…(?: (over )?([0-9,]+) lines of the message left out)?"
"""Stands for lines that were left out before."""
_NATIVE_FRAME = r"frame #\d+: |<omitting python frames>|\s+@ +0x"
"""Lines of a native stack trace, which would hide the message."""
_NATIVE_REPORT = r"terminate called |\[?[EF]\d{3,4} \d\d:\d\d:|F\d{4} "
_INFORMATION = (
    r"(?:\[rank\d+\]:)?I\d{4} \d\d:\d\d:|WARNING: All log messages before absl::InitializeLog"
)
"""Lines that each start of TensorFlow or torch writes, and that explain no end."""
_LOG_LINE = (
    rf"{_IGNORED}|\[?[EWIF]\d{{2,4}}[ :]|\d{{4}}-\d\d-\d\d[ T]\d\d:|\[\w+ \d|\w+: WARNING"
    r"|\[?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|\[?(?i:step|epoch|iter)\w* \d|.{0,80}?\d%\|"
)


def last_words(
    stderr: bytes,
    *,
    uncaught: bool = False,
    stale_after: int = STALE_AFTER,
    plain_lines: int = PLAIN_LINES,
) -> str:
    """The last chain of Python tracebacks in ``stderr``, or else its last ``plain_lines`` lines.

    Without the prefixes that torch writes before each line, and without anything that is not
    text. ``uncaught``: the process ended as Python ends after an exception, so a long text after
    the last traceback is that exception's message. The middle of a very long message is left out.
    Returns ``""`` for a process that wrote nothing else.
    """
    framer = LineFramer()
    text = framer.feed(_ends(stderr, uncaught)) + framer.flush()
    raw = [clean(line).rstrip() for line in split(text)]
    lines = [re.sub(_PREFIX, "", line) for line in raw]
    headers = [
        number
        for number, line in enumerate(lines)
        if re.match(_HEADER, line) and not (number and lines[number - 1].startswith(_IGNORED))
    ]
    if headers:
        end = _end(raw, lines, headers[-1], len(lines) if uncaught else MESSAGE_LINES)
        if sum(1 for line in raw[end:] if line) <= stale_after:
            last = lines[_start(lines, headers) : end]
            text = "\n".join(line for line in last if not re.match(_NATIVE_FRAME, line))
            return shorten(text, _KEPT_LINES)
    kept = [
        line
        for line, whole in zip(lines, raw, strict=True)
        if line and not re.match(_NATIVE_FRAME, line) and not re.match(_INFORMATION, whole)
    ]
    return "\n".join(kept[len(kept) - min(plain_lines, len(kept)) :])


def shorten(traceback: str, most: int = MESSAGE_LINES) -> str:
    """``traceback`` with at most ``most`` lines of its last exception's message: the first and the
    last ones."""
    lines = traceback.split("\n")
    begin = _message(lines)
    left_out = len(lines) - begin - most
    if left_out <= 1:
        return traceback
    head = begin + most // 2
    cuts = [re.fullmatch(_CUT, line) for line in lines[head : head + left_out]]
    count = sum(int((cut[2] or "0").replace(",", "")) if cut else 1 for cut in cuts)
    over = "over " if any(cut and (cut[1] or not cut[2]) for cut in cuts) else ""
    middle = f"… {over}{count:,} lines of the message left out"
    return "\n".join([*lines[:head], middle, *lines[head + left_out :]])


def is_traceback(output: str) -> bool:
    """Whether the result of `last_words` is a traceback, and not other output."""
    return any(re.match(_HEADER, line) for line in output.split("\n"))


def headline(output: str) -> str:
    """The line of `last_words` that names the exception, or else the last line."""
    lines = output.split("\n")
    begin = _message(lines)
    return lines[begin if begin < len(lines) else -1]


def _message(lines: list[str]) -> int:
    """Where the last exception's message begins; the number of lines if there is none."""
    header = len(lines) - 1
    while header >= 0 and not lines[header].startswith("Traceback ("):
        header -= 1
    if header < 0:
        return len(lines)
    begin = header + 1
    while begin < len(lines) and lines[begin].startswith((" ", "\t")):
        begin += 1
    return begin


def _ends(stderr: bytes, uncaught: bool) -> bytes:
    """The last bytes, and those from the last traceback on where these are further up."""
    tail = stderr[-2 * _KEPT_BYTES :]
    header = stderr.rfind(b"Traceback (most recent call last):")
    if not uncaught or header < 0 or header >= len(stderr) - len(tail):
        return tail
    # With the beginning of its line, which may be torch's prefix.
    begin = stderr.rfind(b"\n", max(0, header - 200), header) + 1 or header
    head, tail = stderr[begin : begin + _KEPT_BYTES], stderr[-_KEPT_BYTES:]
    return head + "\n…\n".encode() + tail


def _start(lines: list[str], headers: list[int]) -> int:
    """The first line of the chain that ends with the last traceback."""
    start = headers[-1]
    if lines[start].startswith("Fatal Python error"):
        # The interpreter prints its position. The library that aborted prints the reason before.
        near = range(max(0, start - STALE_AFTER), start)
        return next((number for number in near if re.match(_NATIVE_REPORT, lines[number])), start)
    for earlier in reversed(headers[:-1]):
        before = [line for line in lines[earlier:start] if line]
        if not before or before[-1].strip() not in _CHAINED:
            break
        start = earlier
    return start


def _end(raw: list[str], lines: list[str], header: int, most: int) -> int:
    """The line after a traceback's message, which may have several lines, up to about ``most``."""
    prefix = re.match(_PREFIX, raw[header])
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
    goes_on |= most > MESSAGE_LINES
    end += 1
    left = most
    while left and end < len(lines) and (lines[end] or goes_on):
        if re.match(_LOG_LINE, raw[end]):
            break
        # A DataLoader's message contains another process's traceback of any length.
        left -= not lines[end].startswith("  ")
        end += 1
    end = min(end, len(lines))
    while not lines[end - 1]:
        end -= 1
    return end
