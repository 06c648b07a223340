"""`dtrain` without a command: where to start, and the runs that are alive."""

from __future__ import annotations

import os
from pathlib import Path

from dtrain.diagnostics import DtrainError
from dtrain_cli.views import welcome as view

SUMMARY = (
    "dtrain launches multi-node training from one YAML file: over SSH, on Slurm or on Kubernetes."
)


def welcome() -> str:
    runs = Path(os.environ.get("DTRAIN_HOME") or "~/.dtrain").expanduser() / "runs"
    if not runs.is_dir():
        return view.text(SUMMARY, [])
    # Slow to import, and a newcomer has no runs.
    from dtrain.session.status import active

    try:
        return view.text(SUMMARY, active())
    except DtrainError:
        # Commands that use a damaged folder report it.
        return view.text(SUMMARY, [])
