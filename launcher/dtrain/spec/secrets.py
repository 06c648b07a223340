"""``job.secrets`` and the URL of ``notify.webhook``: the cluster file has the names, and the
launching environment has the values."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping

from dtrain.diagnostics import UsageError
from dtrain.spec.additions import check_text
from dtrain.spec.model import ClusterFile


def secret_values(spec: ClusterFile, known: Mapping[str, str]) -> dict[str, str]:
    """The value of each secret, from ``known`` (such as the environment). Raises UsageError if one
    is missing or no program can get it, or if the webhook's is no URL."""
    webhook = spec.notify.webhook if spec.notify is not None else None
    for key, names in (("job.secrets", spec.job.secrets), ("notify.webhook", (webhook,))):
        if missing := [name for name in names if name is not None and name not in known]:
            raise UsageError(
                f"{key}: not set in this environment: {', '.join(missing)}",
                hint=f"export {missing[0]} before launching",
            )
    values = known_secrets(spec, known)
    for name, value in values.items():
        check_text(value, f"the value of {name}")
    if webhook is not None and (wrong := url_fault(values[webhook])):
        raise UsageError(
            f"notify.webhook: {webhook} has no valid URL: {wrong}",
            hint=f"export {webhook}=https://…",
        )
    return values


def known_secrets(spec: ClusterFile, known: Mapping[str, str]) -> dict[str, str]:
    """The values of those secrets that ``known`` has."""
    return {name: known[name] for name in secret_names(spec) if name in known}


def secret_names(spec: ClusterFile) -> tuple[str, ...]:
    webhook = spec.notify.webhook if spec.notify is not None else None
    return (*spec.job.secrets, *((webhook,) if webhook is not None else ()))


def url_fault(url: str) -> str:
    """Why ``url`` is not the URL of a webhook, without the URL; empty if it is one."""
    try:
        parts = urllib.parse.urlsplit(url)
        found = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is no number
        found = False
    if not found:
        return "the URL must start with https:// or http:// and a host, and any port must be valid"
    if any(not 32 < ord(char) < 127 for char in url):
        return "the URL must have no spaces and only ASCII characters"
    return ""
