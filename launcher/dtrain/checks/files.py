"""Checks that the script and the code next to it exist and are the same on all hosts."""

from __future__ import annotations

from collections.abc import Iterator

from dtrain.checks.evidence import Evidence
from dtrain.checks.finding import Finding, error
from dtrain.checks.skew import differing, first_of, outliers

SAFE = "no other user can change what the job runs"


def judge(evidence: Evidence) -> Iterator[Finding]:
    job = evidence.plan.job
    if evidence.script_in_source is False:
        yield error(
            "script",
            evidence.plan.host_names,
            f"{job.script} is not in the folder to send, job.sync.source:"
            f" {job.sync.source if job.sync else '.'}",
            "the folder to send contains the script",
            "set job.sync.source to the folder of the script, and job.script to its path in that"
            " folder",
        )
    elif evidence.script_in_source is None:
        yield from _script(evidence)
    yield from _launcher(evidence)
    yield from _unsafe(evidence)
    if job.sync is None:
        yield from _workdir(evidence)
        yield from _code(evidence)


def _launcher(evidence: Evidence) -> Iterator[Finding]:
    """A program that starts a process for each GPU, on hosts that would run it for each GPU."""
    name = evidence.plan.shell_script or "job.command"
    for host in evidence.hosts:
        launcher = evidence.launcher
        if launcher is None:
            launcher = host.fact("script").get("launcher", "")
        times = sum(process.role == "worker" for process in host.part.processes)
        if launcher and times > 1:
            yield host.warning(
                "script",
                f"{name} starts {launcher}, and each host runs it {times} times",
                "a program that starts a process for each GPU runs once on each host",
                "set job.per to host: `dtrain help programs` shows how to start launchers",
            )


def _unsafe(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.hosts:
        found = host.fact("script").get("unsafe")
        if found:
            yield host.error("job.workdir", found["seen"], SAFE, found["remedy"])


def _workdir(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.hosts:
        found = host.fact("script")
        if found and not found["workdir_exists"]:
            yield host.error(
                "workdir",
                f"the folder {host.short(found['workdir'])} does not exist",
                "job.workdir exists",
                f"mkdir -p {host.part.workdir} there, or {evidence.send}",
            )


def _script(evidence: Evidence) -> Iterator[Finding]:
    name = evidence.plan.job.script
    digests: dict[str, str] = {}
    for host in evidence.hosts:
        found = host.fact("script")
        # If the folder itself is missing, `_workdir` reports that.
        there = found.get("workdir_exists") or str(name).startswith("/")
        if there and found.get("exists") is False:
            yield host.error(
                "script",
                f"{host.short(found.get('path', str(name)))} does not exist",
                f"{name} exists",
                f"copy it there, set job.workdir to its folder, or {evidence.send}",
            )
        elif "digest" in found:
            digests[host.name] = f"its CRC-32 is {found['digest']}"
    for outlier in outliers(digests):
        yield error(
            "script",
            outlier.hosts,
            f"{name} differs between hosts: {outlier.seen}",
            "the same content everywhere: ranks that run different code wait for each other",
            f"copy it again to {'these hosts' if len(outlier.hosts) > 1 else 'this host'},"
            f" or {evidence.send}",
        )


def _code(evidence: Evidence) -> Iterator[Finding]:
    """Files next to the script that differ from those on most hosts."""
    found = {host.name: host.fact("script").get("code") for host in evidence.hosts}
    known = {host: dict(files) for host, files in found.items() if files is not None}
    if len(known) < 2:
        return
    script = evidence.plan.job.script
    for name, differ in differing(known).items():
        own = sorted(file for file in differ if file != script)
        if own:
            host = evidence[name]
            yield host.warning(
                "code",
                f"files in {host.part.workdir} differ: {first_of(own)}",
                "the same content as on most hosts",
                f"copy the folder again, or {evidence.send}",
            )
