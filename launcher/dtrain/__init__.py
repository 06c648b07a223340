"""dtrain: launch multi-node training from one YAML file, over SSH, on Slurm or on Kubernetes.

The Python API is described in `dtrain.api`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.api import LaunchedRun, attach, check, execute, launch, plan, stop
    from dtrain.checks import Finding, Severity
    from dtrain.diagnostics import DtrainError, ExitCode, SpecError, UsageError
    from dtrain.failures.cause import Failure, Report
    from dtrain.loading import load
    from dtrain.parallelism.question import Answer
    from dtrain.planning.request import PlanRequest
    from dtrain.runs.request import Request
    from dtrain.session.relays.commands import Outcome
    from dtrain.session.reporting.callbacks import Line
    from dtrain.session.stopping.control import Control

__version__ = "0.1.0"

__all__ = [
    "Answer", "Control", "DtrainError", "ExitCode", "Failure", "Finding", "LaunchedRun", "Line",
    "Outcome", "PlanRequest", "Report", "Request", "Severity", "SpecError", "UsageError",
    "__version__", "attach", "check", "execute", "launch", "load", "plan", "stop",
]  # fmt: skip

_MODULES = {
    "dtrain.api": ("LaunchedRun", "attach", "check", "execute", "launch", "plan", "stop"),
    "dtrain.checks": ("Finding", "Severity"),
    "dtrain.diagnostics": ("DtrainError", "ExitCode", "SpecError", "UsageError"),
    "dtrain.failures.cause": ("Failure", "Report"),
    "dtrain.loading": ("load",),
    "dtrain.parallelism.question": ("Answer",),
    "dtrain.planning.request": ("PlanRequest",),
    "dtrain.runs.request": ("Request",),
    "dtrain.session.reporting.callbacks": ("Line",),
    "dtrain.session.relays.commands": ("Outcome",),
    "dtrain.session.stopping.control": ("Control",),
}
"""Where each name is from. Loaded with its first use: `import dtrain` loads none of them."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'dtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
