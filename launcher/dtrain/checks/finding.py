"""Findings of `dtrain check`, folded over hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from enum import Enum, unique
from typing import Any

from dtrain import hostlist
from dtrain.records import dataclass
from dtrain.wording import counted


@unique
class Severity(Enum):
    """Worst first."""

    ERROR = "error"
    """The job would fail or hang."""
    WARNING = "warning"
    """The job may start, but is slow or may fail later."""


HOSTS = "{hosts}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem on one or more hosts.

    Its texts are single sentences or phrases. They may quote text from hosts: clean them before
    they reach a terminal.
    """

    severity: Severity
    subject: str
    """One or two words: ``torch``, ``script``, ``network``."""
    hosts: tuple[str, ...]
    seen: str
    expected: str
    remedy: str
    """A command to run, or a key of the cluster file to set. `fold` replaces `HOSTS` in it with
    the hosts of the finding, in the syntax of ``cluster.overrides``."""
    place: str = ""
    """The place in the cluster file, such as ``cluster.yaml:3:12``, if one key is the cause."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "severity": self.severity.value}


def error(
    subject: str, hosts: Sequence[str], seen: str, expected: str, remedy: str, place: str = ""
) -> Finding:
    return Finding(Severity.ERROR, subject, tuple(hosts), seen, expected, remedy, place)


def warning(
    subject: str, hosts: Sequence[str], seen: str, expected: str, remedy: str, place: str = ""
) -> Finding:
    return Finding(Severity.WARNING, subject, tuple(hosts), seen, expected, remedy, place)


def refusal(errors: int) -> tuple[str, str]:
    """The reason and the hint of a launch that ended because the check found ``errors``."""
    return (
        f"not started: the check found {counted(errors, 'error')}",
        "fix what it found; `dtrain launch --no-check` skips the check",
    )


def fold(findings: Iterable[Finding], order: Sequence[str]) -> tuple[Finding, ...]:
    """Each distinct finding once, with all its hosts in ``order``. Worst first, then by number of
    hosts, highest first."""
    place = {host: index for index, host in enumerate(order)}
    hosts: dict[Finding, set[str]] = {}
    for finding in findings:
        hosts.setdefault(replace(finding, hosts=()), set()).update(finding.hosts)
    folded = []
    for finding, names in hosts.items():
        those = sorted(names, key=lambda name: place.get(name, len(place)))
        remedy = finding.remedy.replace(HOSTS, hostlist.fold(those))
        folded.append(replace(finding, hosts=tuple(those), remedy=remedy))
    severities = list(Severity)
    return tuple(sorted(folded, key=lambda one: (severities.index(one.severity), -len(one.hosts))))
