"""`dtrain` without a command: where to start, and the runs that are alive."""

from __future__ import annotations

from dtrain.diagnostics import DtrainError
from dtrain.runs.storage import home
from dtrain_cli.views import welcome as view

SUMMARY = (
    "dtrain launches multi-node training from one YAML file: over SSH, on Slurm or on Kubernetes."
)


def welcome() -> str:
    try:
        if not (home() / "runs").is_dir():
            return view.text(SUMMARY, [])
        # Slow to import, and a newcomer has no runs.
        from dtrain.session.status import active

        return view.text(SUMMARY, active())
    except DtrainError:
        # Commands that use a damaged folder report it.
        return view.text(SUMMARY, [])
