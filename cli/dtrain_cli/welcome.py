"""`dtrain` without a command: where to start, and the runs that are alive."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from dtrain.diagnostics import DtrainError
from dtrain.runs.storage import home
from dtrain_cli.views import names

if TYPE_CHECKING:
    from dtrain.runs.status import RunStatus

MOST = 8
"""Runs to show; `dtrain ps` shows all."""
_SUMMARY = (
    "dtrain launches multi-node training from one YAML file: over SSH, on Slurm or on Kubernetes."
)
_START = """\
  dtrain init                  write a first cluster file from your answers
  dtrain check cluster.yaml    find what would make the job fail
  dtrain launch cluster.yaml   start the job, stream its output, clean up
"""
_MORE = "`dtrain --help` lists all commands, `dtrain help` the documentation."


def welcome() -> str:
    """Return the page."""
    runs: list[RunStatus] = []
    with suppress(DtrainError):  # commands that use a damaged folder report it
        if (home() / "runs").is_dir():
            # Slow to import, and a newcomer has no runs.
            from dtrain.runs.status import active

            runs = active()
    parts = [_START, _alive(runs), _MORE] if runs else [_START, _MORE]
    return "\n".join([f"{_SUMMARY}\n", *parts])


def _alive(runs: Sequence[RunStatus]) -> str:
    """``runs``: the latest last."""
    from dtrain.runs.status import age

    shown = runs[-MOST:]
    verb = "run is" if len(runs) == 1 else "runs are"
    width = max(len(run.run) for run in shown)
    lines = [f"{len(runs)} {verb} alive:", ""]
    lines += [
        f"  {run.run:{width}}  {run.state}, started {names.duration(age(run.started))} ago"
        for run in reversed(shown)
    ]
    if len(runs) > MOST:
        lines.append(f"  {len(runs) - MOST} more: dtrain ps")
    latest = shown[-1].run
    return "\n".join(
        [
            *lines,
            "",
            "  dtrain top" + " " * (len(latest) + 7) + "what their hosts and GPUs do",
            f"  dtrain attach {latest}   watch it; Ctrl-C leaves it running",
            f"  dtrain logs {latest}     show its output",
            f"  dtrain stop {latest}     end it on every host",
            "",
        ]
    )
