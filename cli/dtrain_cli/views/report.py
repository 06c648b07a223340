"""The final report of a run, on one screen, with the first cause first. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial

from dtrain.diagnostics import ExitCode
from dtrain.failures.catalogue import FROM_OUTSIDE
from dtrain.failures.cause import Failure, Report
from dtrain.failures.traceback import shorten
from dtrain.framing import clean
from dtrain.hostlist import in_order
from dtrain.session.reporting.feed import StreamKey
from dtrain.wording import counted
from dtrain_cli.views import names

_TRACEBACK_HEAD = 4
_TRACEBACK_TAIL = 26
_LINE_WIDTH = 400
_MAX_OUTCOMES = 4
_MAX_PROBLEMS = 8
_COMMAND = re.compile(r"`[^`]+`")


def render(
    report: Report,
    paths: Mapping[StreamKey, str],
    *,
    color: bool,
    over: bool = True,
    columns: int | None = None,
) -> str:
    """Return the report as text for stderr, with a final newline. ``over``: whether the run ended
    with it, and not only an attempt. ``columns``: the width of a terminal, for long sentences."""
    failed = report.exit_code not in (ExitCode.OK, ExitCode.INTERRUPTED)
    marked = partial(_marked, color=color, columns=columns)
    lines: list[str] = []
    if failed:
        lines.append("")
        first = report.failures[0] if report.failures else None
        if first is not None and report.reason == first.summary:
            lines += marked("error", _headline(first))
            lines += _traceback(first, paths)
            lines += _consequences(report.failures[1:])
        else:
            lines += marked("error", report.reason)
            lines += _consequences(report.failures)
    for text in _problems(report):
        lines += marked("warning" if report.ok else "problem", text)
    if report.hint:
        lines += marked("hint", report.hint)
    if over:
        lines.append(_end(report, failed=failed, color=color))
    return "".join(f"{line}\n" for line in lines)


def _end(report: Report, *, failed: bool, color: bool) -> str:
    after = names.spent(report.seconds)
    logs = f"; logs in {names.path(report.logs)}" if report.logs else ""
    word = "done in" if report.exit_code == ExitCode.OK else "failed after"
    reason = "" if failed else f": {clean(report.reason)}"
    if report.exit_code == ExitCode.INTERRUPTED:
        word = "stopped after"
    head = names.paint("dtrain:", "bold") if color else "dtrain:"
    return f"{head} {word} {after}{reason}{logs}"


def _headline(failure: Failure) -> str:
    text = clean(failure.summary)
    message = failure.message.strip()
    if not message or message in failure.traceback:
        return text  # The traceback below has the message.
    return f"{text}: {_cut(clean(message))}"


def _traceback(failure: Failure, paths: Mapping[StreamKey, str]) -> list[str]:
    lines = [_cut(clean(line)) for line in shorten(failure.traceback.strip("\n")).split("\n")]
    if not any(lines):
        return []
    left_out = len(lines) - _TRACEBACK_HEAD - _TRACEBACK_TAIL
    if left_out > 1:
        path = paths.get((failure.host, failure.role, failure.index, "stderr"))
        where = f" (full text in {names.path(path)})" if path else ""
        middle = f"… {counted(left_out, 'line')} left out{where}"
        lines = [*lines[:_TRACEBACK_HEAD], middle, *lines[-_TRACEBACK_TAIL:]]
    shown = ["", *(f"    {line}" if line else "" for line in lines), ""]
    if failure.ended_by in FROM_OUTSIDE:
        return ["before that, its stderr ended with:", *shown]
    return shown


def _consequences(failures: Sequence[Failure]) -> list[str]:
    """The other failed processes, grouped by how they ended."""
    outcomes: dict[str, list[Failure]] = {}
    for failure in failures:
        outcomes.setdefault(failure.how, []).append(failure)
    lines = []
    for outcome, group in list(outcomes.items())[:_MAX_OUTCOMES]:
        hosts = names.hosts(in_order({failure.host for failure in group}))
        who = names.workers([failure.label for failure in group])
        lines.append(clean(f"then also failed: {hosts} {who} ({outcome.removeprefix('was ')})"))
    if (more := sum(map(len, list(outcomes.values())[_MAX_OUTCOMES:]))) > 0:
        lines.append(f"then also failed: {counted(more, 'other')}")
    return lines


def _problems(report: Report) -> list[str]:
    # A problem that is the reason of the end is already shown.
    problems = [text for text in report.problems if text != report.reason]
    more = len(problems) - _MAX_PROBLEMS
    return [*problems[:_MAX_PROBLEMS], f"and {more} more"] if more > 0 else problems


def _marked(word: str, text: str, *, color: bool, columns: int | None) -> list[str]:
    indent = "    "
    lines = [clean(line) for line in text.strip("\n").split("\n")]
    if word != "hint":  # dtrain's own words, often with a command
        lines = [*map(_cut, lines)]
    first, *rest = [f"{word}: {lines[0]}", *(f"{indent}{line}" for line in lines[1:])]
    if columns is not None:
        wrap = textwrap.TextWrapper(
            columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ).wrap
        # A command stays in one line, to be copied.
        whole = [
            _COMMAND.sub(lambda found: found[0].replace(" ", "\0"), line) for line in (first, *rest)
        ]
        first, *rest = [part.replace("\0", " ") for line in whole for part in wrap(line)]
    return [names.marked(first) if color else first, *rest]


def _cut(line: str) -> str:
    return line if len(line) <= _LINE_WIDTH else f"{line[:_LINE_WIDTH]}…"
