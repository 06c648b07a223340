"""``job.secrets``: the cluster file has the names, and the launching environment the values."""

from __future__ import annotations

from collections.abc import Mapping

from dtrain.diagnostics import UsageError
from dtrain.spec.model import ClusterFile


def secret_values(spec: ClusterFile, known: Mapping[str, str]) -> dict[str, str]:
    """The value of each secret, from ``known`` (such as the environment). Raises UsageError if one
    is missing."""
    if missing := [name for name in spec.job.secrets if name not in known]:
        raise UsageError(
            f"job.secrets: not set in this environment: {', '.join(missing)}",
            hint=f"export {missing[0]} before launching",
        )
    return {name: known[name] for name in spec.job.secrets}


def known_secrets(spec: ClusterFile, known: Mapping[str, str]) -> dict[str, str] | None:
    """Like `secret_values`, but None if a value is missing."""
    try:
        return secret_values(spec, known)
    except UsageError:
        return None
