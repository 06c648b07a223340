"""Checks the result of a rehearsal: a real process group, or TensorFlow servers, on all hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtrain.checks.evidence import Evidence, Facts
from dtrain.checks.finding import Finding, error
from dtrain.checks.reach import groups

_EXPECTED = "all processes of the job can connect"


def judge(evidence: Evidence) -> Iterator[Finding]:
    reports = [(host, one) for host, answers in evidence.rehearsal.items() for one in answers]
    if not reports:
        return
    for host, report in reports:
        if report["failed"] in ("import", "start", "server"):
            yield error(
                "rendezvous",
                [host],
                f"a process did not start: {report['error']}",
                "the job's interpreter starts and imports the framework",
                "start it there by hand, with the commands of `dtrain launch --dry-run`",
            )
    if evidence.plan.job.framework == "torch":
        yield from _torch(evidence, reports)
    else:
        yield from _tensorflow(evidence, reports)


def _torch(evidence: Evidence, reports: Sequence[tuple[str, Facts]]) -> Iterator[Finding]:
    names = evidence.plan.host_names
    host_of = {report["rank"]: host for host, report in reports}
    first, port = names[0], evidence.plan.hosts[0].ports[0]
    unconnected = {host: report["error"] for host, report in reports if report["failed"] == "store"}
    for host, reason in unconnected.items():
        yield error(
            "rendezvous",
            [first, host] if host != first else [host],
            f"{host} cannot connect to the store of rank 0 on {first}: {reason}",
            _EXPECTED,
            f"allow TCP port {port} on {first}, and check that its address is correct",
        )
    failed: dict[tuple[str, str], str] = {}
    others: dict[str, str] = {}
    for host, report in reports:
        if report["failed"] == "group":
            others.setdefault(host, report.get("error", ""))
            for one, other, reason in report.get("pairs", ()):
                failed[host_of.get(one, "?"), host_of.get(other, "?")] = reason
    for group in groups(names, failed):
        yield error(
            "rendezvous",
            group.hosts,
            f"no process group between {group}: {failed[group.example]}",
            _EXPECTED,
            "allow all TCP ports between them; if they have several networks, set"
            " cluster.network.interface to the right one",
        )
    if others and not failed and not unconnected:
        host, reason = next(iter(others.items()))
        yield error(
            "rendezvous",
            list(others),
            f"the group of all ranks fails although each pair of hosts can connect; error on"
            f" {host}: {reason}",
            _EXPECTED,
            "set job.env NCCL_DEBUG: INFO (or TORCH_DISTRIBUTED_DEBUG: DETAIL), check again, and"
            " look for the first error",
        )


def _tensorflow(evidence: Evidence, reports: Sequence[tuple[str, Facts]]) -> Iterator[Finding]:
    up = {tuple(report["task"]): host for host, report in reports if not report["failed"]}
    silent: dict[tuple[str, str], str] = {}
    for host, report in reports:
        for kind, index in report["silent"]:
            if (kind, index) in up:
                silent[host, up[kind, index]] = f"{kind} {index}"
    for group in groups(evidence.plan.host_names, silent):
        yield error(
            "rendezvous",
            group.hosts,
            f"TensorFlow servers do not answer between {group}: {group.example[0]} called"
            f" {silent[group.example]} on {group.example[1]}",
            _EXPECTED,
            "allow the ports of TF_CONFIG (`dtrain launch --dry-run`) between them, and unset"
            " http_proxy and https_proxy in job.env and job.setup",
        )
