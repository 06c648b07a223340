"""``job.secrets``: their values come from the environment of whoever launches."""

from __future__ import annotations

import os

from dtrain.diagnostics import UsageError
from dtrain.spec.model import ClusterFile


def secret_values(spec: ClusterFile) -> dict[str, str]:
    """The value of each secret by its name. Raises UsageError where one is missing."""
    if missing := [name for name in spec.job.secrets if name not in os.environ]:
        raise UsageError(
            f"job.secrets names {', '.join(missing)}, which this environment does not have",
            hint=f"export {missing[0]} before launching",
        )
    return {name: os.environ[name] for name in spec.job.secrets}


def known_secrets(spec: ClusterFile) -> dict[str, str] | None:
    """The same; None where one is missing."""
    try:
        return secret_values(spec)
    except UsageError:
        return None
