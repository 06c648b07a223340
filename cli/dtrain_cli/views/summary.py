"""What a run did, as text or JSON. Pure."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from difflib import unified_diff
from typing import TYPE_CHECKING, Any

from dtrain.framing import clean
from dtrain.messages.agent import Revision
from dtrain.runs.goodput import CLASSES, AttemptTime
from dtrain.runs.measured import Difference
from dtrain.runs.summary import Summary
from dtrain.wording import counted
from dtrain_cli.views import names
from dtrain_cli.views.document import document
from dtrain_cli.views.overview import attach_hint
from dtrain_cli.views.report import render

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dtrain_cli.views.paper import Paper

SCHEMA = 1
TITLES = {
    "start": "start",
    "data": "waiting for data",
    "steps": "steps",
    "save": "saving checkpoints",
    "load": "loading checkpoints",
    "lost": "lost work",
    "waiting": "waiting",
    "hung": "hung",
    "other": "other",
}
"""The name of each class of time."""
CHANGES = 20
"""Lines of a comparison that show how the requests differ."""
CHANGED = 5
"""Changed files that are named."""
EVENTS = 20
"""Events that the text shows, the last ones."""


def as_text(run: Summary, paper: Paper, written: Sequence[str] = ()) -> str:
    """Return the report for a terminal. ``written`` are lines about other outputs."""
    sections: list[list[RenderableType]] = [
        [paper.entry(title, clean(text)) for title, text in facts(run)],
        _goodput(run, paper),
        _attempts(run, paper),
        _planned(run, paper),
        _slow(run, paper),
        _events(run, paper),
        [paper.entry("Written", clean(text)) for text in written],
    ]
    ended = ""
    if run.report is not None:
        columns = paper.columns if paper.terminal else None
        over = run.ended is not None
        ended = render(run.report, {}, color=paper.color, over=over, columns=columns)
    return "\n".join(filter(None, (paper.sections(sections), ended.lstrip("\n"))))


def _hosts(run: Summary, shown: Callable[[Sequence[str]], str]) -> str:
    return shown(run.hosts) if run.hosts else counted(len(run.record.plan.hosts), "host")


def facts(run: Summary) -> list[tuple[str, str]]:
    """Titles and values about the whole run."""
    last = _last_step(run)
    measured = run.measured
    speed = [f"{measured.step_time:.3g} s a step"] if measured.step_time is not None else []
    if measured.tokens_per_second is not None:
        speed.append(f"{measured.tokens_per_second:,.0f} tokens/s")
    losses = [point.loss for point in run.curve if point.loss is not None]
    gpus = f", {counted(run.gpus, 'GPU')}" if run.gpus else ""
    found = [
        ("Run", run.record.run),
        ("State", run.state),
        ("Began", _moment(run.began)),
        ("Launcher", "" if run.attended else f"none; {attach_hint(run.record.run)}"),
        ("Took", names.spent(run.until - run.began)),
        ("Hosts", f"{_hosts(run, names.hosts)}: {counted(run.workers, 'worker')}{gpus}"),
        ("Code", code(run.code) if run.code is not None else ""),
        ("Steps", f"{last:,}" if last is not None else ""),
        ("Loss", f"{losses[0]:.4g} to {losses[-1]:.4g}" if losses else ""),
        ("Speed", ", ".join(speed)),
        (
            "Memory",
            f"{measured.memory_gib:.1f} GiB of the fullest GPU"
            if measured.memory_gib is not None
            else "",
        ),
        ("Goodput", share(run)),
        ("Logs", names.path(run.folder)),
        (
            "Journal",
            f"{counted(run.unreadable, 'line')} could not be read" if run.unreadable else "",
        ),
    ]
    return [(title, text) for title, text in found if text]


def code(known: Revision) -> str:
    """A commit, and the files that differ from it."""
    files = list(known.changed[:CHANGED])
    if rest := len(known.changed) + known.more - len(files):
        files.append(f"{rest:,} more")
    changed = f", changed: {', '.join(files)}" if files else ""
    return f"commit {known.commit[:12]}{changed}"


def _last_step(run: Summary) -> int | None:
    """The last step of the last attempt that reports steps."""
    steps = (one.last_step for one in reversed(run.goodput.attempts))
    return next((step for step in steps if step is not None), None)


def share(run: Summary) -> str:
    """The goodput in words."""
    if run.goodput.share is None:
        return "unknown: the job reports no steps (see `dtrain help job.progress`)"
    return f"{run.goodput.share * 100:.1f} % of the time went into steps that count"


def _moment(seconds: float) -> str:
    """A time since the epoch, in this machine's time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds))


def spans(run: Summary) -> list[tuple[str, float, float]]:
    """The title, the seconds and the share of each class of time that is not empty."""
    wall = run.goodput.wall or 1.0
    of = run.goodput.seconds
    return [(TITLES[name], of[name], of[name] / wall) for name in CLASSES if of[name]]


def attempt_row(one: AttemptTime, run: Summary) -> tuple[str, str, str, str, str]:
    """Number, begin and length, steps, and end of an attempt."""
    steps = f"{one.first_step:,}-{one.last_step:,}" if one.first_step is not None else ""
    return (
        str(one.number),
        f"+{names.spent(one.begin - run.began)}",
        names.spent(one.over - one.begin),
        steps,
        clean(one.why) or run.state,
    )


def slow_ranks(run: Summary) -> list[str]:
    """Each time when the slow ranks changed."""
    found = [one for _, one in run.slow]
    return [f"{one} (step {one.step:,})" if one.step else str(one) for one in found]


def difference_row(one: Difference) -> tuple[str, str, str, str]:
    """What, the planned and the measured value, and their difference."""
    return (
        one.what,
        f"{one.planned:.3g} {one.unit}",
        f"{one.measured:.3g} {one.unit}",
        f"{(one.ratio - 1) * 100:+.0f} %",
    )


def _goodput(run: Summary, paper: Paper) -> list[RenderableType]:
    rows = [(title, names.spent(seconds), f"{of * 100:.1f} %") for title, seconds, of in spans(run)]
    return [paper.table("lrr", rows, titles=("TIME", "", "SHARE"))] if rows else []


def _attempts(run: Summary, paper: Paper) -> list[RenderableType]:
    rows = [attempt_row(one, run) for one in run.goodput.attempts]
    titles = ("ATTEMPT", "BEGAN", "LASTED", "STEPS", "END")
    return [paper.table("rrrrw", rows, titles=titles)] if rows else []


def _planned(run: Summary, paper: Paper) -> list[RenderableType]:
    if not run.differences:
        return []
    titles = ("", "PLANNED", "MEASURED", "")
    rows = [difference_row(one) for one in run.differences]
    return [
        paper.table("lrrr", rows, titles=titles),
        *([paper.paragraph(run.differs)] if run.differs else []),
    ]


def _slow(run: Summary, paper: Paper) -> list[RenderableType]:
    return [paper.entry("Slow", clean(text)) for text in slow_ranks(run)[-5:]]


def _events(run: Summary, paper: Paper) -> list[RenderableType]:
    rows = []
    for one in run.events[-EVENTS:]:
        first, *more = one.text.splitlines() or [""]
        rows.append((f"+{names.spent(one.time - run.began)}", clean(first)))
        rows += [("", clean(line.strip())) for line in more]
    return [paper.table("rw", rows, titles=("", "EVENTS"))] if rows else []


def comparison(first: Summary, second: Summary, paper: Paper) -> str:
    """Return two runs side by side."""
    both = [*zip(("first", "second"), (first, second), strict=True)]
    facts = [
        (which, clean(run.record.run), _hosts(run, names.brief), run.state) for which, run in both
    ]
    rows = [
        (title, show(one), show(two), _ratio(one, two))
        for (title, show, one), (_, _, two) in zip(_figures(first), _figures(second), strict=True)
        if one is not None or two is not None
    ]
    return paper.sections(
        [
            [paper.table("llwl", facts, titles=("", "RUN", "HOSTS", "STATE"))],
            [paper.line(clean(line)) for line in _changes(first, second)],
            [paper.table("lrrr", rows, titles=("", "FIRST", "SECOND", "SECOND / FIRST"))],
        ]
    )


def _changes(first: Summary, second: Summary) -> list[str]:
    """The lines of the requests that differ: those of the first with ``-``, of the second ``+``."""
    before, after = (_origin(run) for run in (first, second))
    lines = [*unified_diff(before, after, n=0, lineterm="")][2:]  # without the names of files
    changes = [f"{line[:1]} {line[1:]}" for line in lines if not line.startswith("@@")]
    more = len(changes) - CHANGES
    return [*changes[:CHANGES], *([f"and {counted(more, 'more line')}"] if more > 0 else [])]


def _origin(run: Summary) -> list[str]:
    """What the run was launched with."""
    request = run.record.request
    settings = [f"--set {shlex.quote(one)}" for one in request.settings]
    args = [f"args: {shlex.join(request.args)}"] if request.args else []
    found = [f"code: {code(run.code) if run.code is not None else 'unknown'}"]
    if run.code is not None and run.code.digest:
        found.append(f"code: digest of its changes {run.code.digest}")
    return [*request.text.splitlines(), *settings, *args, *found]


_Show = Callable[[float | None], str]


def _figures(run: Summary) -> list[tuple[str, _Show, float | None]]:
    """Titles and values to compare, each with how to show the value."""
    losses = [point.loss for point in run.curve if point.loss is not None]
    last, goodput = _last_step(run), run.goodput.share
    length = _shown(names.spent)
    return [
        ("wall time", length, run.goodput.wall),
        ("attempts", _shown("{:.0f}".format), float(len(run.goodput.attempts))),
        ("last step", _shown("{:,.0f}".format), None if last is None else float(last)),
        ("last loss", _shown("{:.4g}".format), losses[-1] if losses else None),
        ("step time", _shown("{:.3g} s".format), run.measured.step_time),
        ("tokens/s", _shown("{:,.0f}".format), run.measured.tokens_per_second),
        ("peak memory", _shown("{:.1f} GiB".format), run.measured.memory_gib),
        ("goodput", _shown("{:.1f} %".format), goodput * 100 if goodput is not None else None),
        *((TITLES[name], length, run.goodput.seconds[name] or None) for name in CLASSES),
    ]


def _shown(known: Callable[[float], str]) -> _Show:
    return lambda value: "-" if value is None else known(value)


def _ratio(first: float | None, second: float | None) -> str:
    return f"{second / first:.2f}" if first and second is not None else ""


def as_json(runs: Sequence[Summary]) -> str:
    """Return one object with ``runs``. Times are seconds since the epoch."""
    return document({"schema": SCHEMA, "runs": [_document(run) for run in runs]})


_OF_ATTEMPT = ("number", "begin", "end", "ok", "why", "first_step", "last_step")


def _document(run: Summary) -> dict[str, Any]:
    return {
        "run": run.record.run,
        "folder": run.folder,
        "state": run.state,
        "began": run.began,
        "ended": run.ended,
        "attended": run.attended,
        "hosts": list(run.hosts),
        "workers": run.workers,
        "gpus": run.gpus,
        "code": asdict(run.code) if run.code is not None else None,
        "goodput": {
            "share": run.goodput.share,
            "wall_s": run.goodput.wall,
            "seconds": dict(run.goodput.seconds),
        },
        "attempts": [
            {name: getattr(one, name) for name in _OF_ATTEMPT} for one in run.goodput.attempts
        ],
        "measured": asdict(run.measured),
        "expected": asdict(run.expected) if run.expected else None,
        "differences": [{**asdict(one), "ratio": one.ratio} for one in run.differences],
        "differs": run.differs,
        "slow": [{"time": then, **asdict(found)} for then, found in run.slow],
        "events": [asdict(one) for one in run.events],
        "report": run.report.as_json() if run.report is not None else None,
        "unreadable_lines": run.unreadable,
    }
