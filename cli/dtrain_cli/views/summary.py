"""What a run did, as text or JSON. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dtrain.framing import clean
from dtrain.runs.goodput import CLASSES, AttemptTime
from dtrain.runs.measured import Difference
from dtrain.runs.summary import Summary
from dtrain_cli.views import names
from dtrain_cli.views.report import render
from dtrain_cli.views.runs import finite

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
    "waiting": "waiting for a host",
    "hung": "hung",
    "other": "other",
}
"""The name of each class of time."""
EVENTS = 20
"""Events that the text shows, the last ones."""


def as_text(run: Summary, paper: Paper, now: float, written: Sequence[str] = ()) -> str:
    """Return the report for a terminal. ``now`` is in seconds since the epoch; ``written`` are
    lines about other outputs."""
    sections: list[list[RenderableType]] = [
        [paper.entry(title, clean(text)) for title, text in facts(run, now)],
        _goodput(run, paper),
        _attempts(run, paper),
        _planned(run, paper),
        _slow(run, paper),
        _events(run, paper),
        [clean(text) for text in written],
    ]
    text = paper.sections(sections)
    if run.report is not None:
        text += f"\n{render(run.report, {}, color=paper.color)}"
    return text


def facts(run: Summary, now: float) -> list[tuple[str, str]]:
    """Titles and values about the whole run."""
    last = next((point for point in reversed(run.curve)), None)
    measured = run.measured
    speed = [f"{measured.step_time:.3g} s a step"] if measured.step_time is not None else []
    if measured.tokens_per_second is not None:
        speed.append(f"{measured.tokens_per_second:,.0f} tokens/s")
    losses = [point.loss for point in run.curve if point.loss is not None]
    gpus = f", {names.count(run.gpus, 'GPU')}" if run.gpus else ""
    found = [
        ("Run", run.record.run),
        ("State", state(run)),
        ("Began", moment(run.began)),
        ("Took", names.duration((run.ended or now) - run.began)),
        ("Hosts", f"{names.hosts(run.hosts)}: {names.count(run.workers, 'worker')}{gpus}"),
        ("Steps", f"{last.step:,}" if last is not None else ""),
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
            f"{names.count(run.unreadable, 'line')} could not be read" if run.unreadable else "",
        ),
    ]
    return [(title, text) for title, text in found if text]


def state(run: Summary) -> str:
    if run.ended is None or run.report is None:
        return "not over"
    return {0: "done", 130: "stopped"}.get(int(run.report.exit_code), "failed")


def share(run: Summary) -> str:
    """The goodput in words."""
    if run.goodput.share is None:
        return "unknown: the job reports no steps (`progress` of dtrain.runtime)"
    return f"{run.goodput.share * 100:.1f} % of the time were steps that count"


def moment(seconds: float) -> str:
    """A time since the epoch, in this machine's time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def spans(run: Summary) -> list[tuple[str, float, float]]:
    """The title, the seconds and the share of each class of time that is not empty."""
    wall = run.goodput.wall or 1.0
    spent = run.goodput.seconds
    return [(TITLES[name], spent[name], spent[name] / wall) for name in CLASSES if spent[name]]


def attempt_row(one: AttemptTime, began: float) -> tuple[str, str, str, str, str]:
    """Number, begin and length, steps, and end of an attempt."""
    steps = f"{one.first_step:,}-{one.last_step:,}" if one.first_step is not None else ""
    return (
        str(one.number),
        f"+{names.duration(one.begin - began)}",
        names.duration(one.end - one.begin),
        steps,
        clean(one.why) if one.why else "not over",
    )


def difference_row(one: Difference) -> tuple[str, str, str, str]:
    """What, the planned and the measured value, and their difference."""
    return (
        one.what,
        f"{one.planned:.3g} {one.unit}",
        f"{one.measured:.3g} {one.unit}",
        f"{(one.ratio - 1) * 100:+.0f} %",
    )


def _goodput(run: Summary, paper: Paper) -> list[RenderableType]:
    rows = [(title, names.duration(spent), f"{of:.1%}") for title, spent, of in spans(run)]
    return [paper.table("lrr", rows, titles=("TIME", "", "SHARE"))] if rows else []


def _attempts(run: Summary, paper: Paper) -> list[RenderableType]:
    rows = [attempt_row(one, run.began) for one in run.goodput.attempts]
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
    return [
        paper.entry("Slow", clean(f"{found} (step {found.step:,})")) for _, found in run.slow[-5:]
    ]


def _events(run: Summary, paper: Paper) -> list[RenderableType]:
    shown = run.events[-EVENTS:]
    rows = [(f"+{names.duration(one.time - run.began)}", clean(one.text)) for one in shown]
    return [paper.table("rw", rows, titles=("EVENTS", ""))] if rows else []


def comparison(first: Summary, second: Summary, paper: Paper) -> str:
    """Return two runs side by side."""
    rows = [
        (title, _number(one, unit), _number(two, unit), _ratio(one, two))
        for (title, unit, one), (_, _, two) in zip(_figures(first), _figures(second), strict=True)
        if one is not None or two is not None
    ]
    heads = [clean(run.record.run) for run in (first, second)]
    facts = [
        (title, names.hosts(run.hosts), state(run))
        for title, run in zip(heads, (first, second), strict=True)
    ]
    return paper.sections(
        [
            [paper.table("lwl", facts, titles=("RUN", "HOSTS", "STATE"))],
            [paper.table("lrrr", rows, titles=("", *heads, "SECOND / FIRST"))],
        ]
    )


def _figures(run: Summary) -> list[tuple[str, str, float | None]]:
    """Titles, units and values to compare."""
    losses = [point.loss for point in run.curve if point.loss is not None]
    goodput = run.goodput.share
    return [
        ("wall time", "s", run.goodput.wall),
        ("attempts", "", float(len(run.goodput.attempts))),
        ("last step", "", float(run.curve[-1].step) if run.curve else None),
        ("last loss", "", losses[-1] if losses else None),
        ("step time", "s", run.measured.step_time),
        ("tokens/s", "", run.measured.tokens_per_second),
        ("peak memory", "GiB", run.measured.memory_gib),
        ("goodput", "%", goodput * 100 if goodput is not None else None),
        *((TITLES[name], "s", run.goodput.seconds[name] or None) for name in CLASSES),
    ]


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    text = f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"
    return f"{text} {unit}".rstrip()


def _ratio(first: float | None, second: float | None) -> str:
    return f"{second / first:.2f}" if first and second is not None else ""


def as_json(runs: Sequence[Summary]) -> str:
    """Return one object with ``runs``. Times are seconds since the epoch."""
    body = {"schema": SCHEMA, "runs": [_document(run) for run in runs]}
    return json.dumps(finite(body), indent=2) + "\n"


def _document(run: Summary) -> dict[str, Any]:
    return {
        "run": run.record.run,
        "folder": run.folder,
        "state": state(run),
        "began": run.began,
        "ended": run.ended,
        "hosts": list(run.hosts),
        "workers": run.workers,
        "gpus": run.gpus,
        "goodput": {
            "share": run.goodput.share,
            "wall_s": run.goodput.wall,
            "seconds": dict(run.goodput.seconds),
        },
        "attempts": [
            {
                **{name: getattr(one, name) for name in ("number", "begin", "end", "ok", "why")},
                "first_step": one.first_step,
                "last_step": one.last_step,
            }
            for one in run.goodput.attempts
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
