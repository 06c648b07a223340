"""The findings of `dtrain check`, as text and as JSON. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dtrain.checks import Evidence, Finding, HostFacts, Severity, bandwidth
from dtrain.framing import clean
from dtrain.wording import counted
from dtrain_cli.views import fabric, names
from dtrain_cli.views.document import document

if TYPE_CHECKING:
    from rich.text import Text

    from dtrain_cli.views.paper import Paper

SCHEMA = 1
_STYLES = {Severity.ERROR: "red", Severity.WARNING: "yellow"}


def as_text(evidence: Evidence, found: Sequence[Finding], seconds: float, paper: Paper) -> str:
    """Return all findings, worst first. Each entry has hosts and subject in its first line, then
    what was found, what was expected, and the remedy."""
    measured = bandwidth.fabric(evidence)
    hosts = evidence.plan.host_names
    lines = list(fabric.as_text(measured, hosts, paper)) if measured else []
    for finding in found:
        lines += [*entry(finding, len(hosts), paper), paper.line()]
    summary = _summary(evidence, found, seconds)
    return paper.draw([*lines, paper.paragraph(summary, "bold" if found else "green")])


def entry(finding: Finding, of: int, paper: Paper) -> Iterator[Text]:
    """Yield the lines of one finding; ``of`` is the number of all hosts."""
    yield paper.line(
        (f"{finding.severity.value:<9}", _STYLES[finding.severity]),
        (names.hosts(finding.hosts) + _count(finding, of), "bold"),
        f": {clean(finding.subject)}",
        *([(f"  {clean(finding.place)}", "dim")] if finding.place else []),
    )
    for title, text, style in (
        ("", finding.seen, ""),
        ("expected ", finding.expected, "dim"),
        ("remedy   ", finding.remedy, ""),
    ):
        if text:
            yield paper.paragraph(clean(text), style, head=" " * 9 + title)


def brief(finding: Finding, of: int) -> str:
    """Return the finding in one line, without the remedy."""
    what = clean(f"{finding.subject}: {finding.seen}")
    return f"{finding.severity.value}: {names.brief(finding.hosts)}{_count(finding, of)}: {what}"


def _count(finding: Finding, of: int) -> str:
    count = len(finding.hosts)
    return f" ({'all ' if count == of else ''}{count})" if count > 1 else ""


def _summary(evidence: Evidence, found: Sequence[Finding], seconds: float) -> str:
    count = len(evidence.plan.hosts)
    # An engine that refuses the request chooses no hosts.
    what = f"{counted(count, 'host')} checked" if count else "request checked"
    counts = Counter(finding.severity for finding in found)
    parts = [counted(counts[one], one.value) for one in Severity if counts[one]]
    result = ", ".join(parts) or "no problems found"
    return f"{what} in {names.spent(seconds)}: {result}"


def as_json(evidence: Evidence, found: Sequence[Finding]) -> str:
    """Return one JSON object: every host with its facts, and the findings."""
    failures = {failure.host: failure.message for failure in evidence.failures}
    answered = {host.name: host for host in evidence.hosts}
    hosts = [
        _host(answered[name]) if name in answered else {"host": name, "error": failures.get(name)}
        for name in evidence.plan.host_names
    ]
    measured = bandwidth.fabric(evidence)
    body = {
        "schema": SCHEMA,
        "name": evidence.plan.name,
        "hosts": hosts,
        **({"bandwidth": fabric.as_document(measured)} if measured else {}),
        "findings": [finding.as_json() for finding in found],
    }
    return document(body)


def _host(host: HostFacts) -> dict[str, Any]:
    return {
        "host": host.name,
        "latency": round(host.latency, 6),
        "clock_offset": round(host.clock_offset, 6),
        "clock_error": round(host.clock_error, 6),
        "facts": dict(host.facts),
        "dialed": [dict(one) for one in host.dialed],
    }
