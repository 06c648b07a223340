"""``job.secrets``: the file names them; whoever launches gives their values."""

from __future__ import annotations

from collections.abc import Mapping

from dtrain.diagnostics import UsageError
from dtrain.spec.model import ClusterFile


def secret_values(spec: ClusterFile, known: Mapping[str, str]) -> dict[str, str]:
    """The value of each secret in ``known``, the environment say. Raises UsageError if one is
    missing."""
    if missing := [name for name in spec.job.secrets if name not in known]:
        raise UsageError(
            f"job.secrets names {', '.join(missing)}, which this environment does not have",
            hint=f"export {missing[0]} before launching",
        )
    return {name: known[name] for name in spec.job.secrets}


def known_secrets(spec: ClusterFile, known: Mapping[str, str]) -> dict[str, str] | None:
    """The same; None if one is missing."""
    try:
        return secret_values(spec, known)
    except UsageError:
        return None
