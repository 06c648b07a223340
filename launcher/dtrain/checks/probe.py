"""The measurements of `dtrain plan --probe`, from the reports of all ranks. Pure."""

from __future__ import annotations

from dtrain.checks.bandwidth import calibration, fabric
from dtrain.checks.evidence import Evidence, Facts
from dtrain.diagnostics import PrepareError
from dtrain.parallelism.cluster.hardware import Precision
from dtrain.parallelism.cluster.probe import Probe
from dtrain.wording import counted

ATTEMPTED = "measuring its speed"
PRECISIONS: dict[str, Precision] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "tf32": "tf32",
    "float32": "fp32",
}


def probe(evidence: Evidence) -> Probe:
    """Return the measurements of the slowest rank: the others wait for it.

    Raises NodeError if a host did not answer or a rank failed, or if devices differ.
    """
    if evidence.failures:
        raise evidence.failures[0]
    found = _measurements(evidence)
    first, ranks = _equal_ranks(evidence)
    speeds = {known: _slowest(found, name) for name, known in PRECISIONS.items()}
    products = {known: rows for known, rows in speeds.items() if rows}
    if "fp32" not in products or len(products) < 2:
        raise PrepareError(
            first,
            ATTEMPTED,
            "its ranks report no matrix products of the same sizes",
            hint="run the same version of dtrain on all hosts, or plan without `probe`",
        )
    measured = fabric(evidence)
    every = measured.collectives if measured else ()
    largest = {one.hosts: one for one in sorted(every, key=lambda one: one.size)}
    inside, across = largest.get(1), next((one for at, one in largest.items() if at > 1), None)
    return Probe(
        device=found[0]["device"],
        per_host=ranks,
        memory=min(one["memory"] for one in found) / 2**30,
        products=products,
        copy=min(one["copy"] for one in found) / 1e9,
        attention=min(one["attention"] for one in found),
        collectives=tuple(calibration(measured)["collectives"]) if measured else (),
        link=inside.bus / 1e9 if inside else None,
        network=across.bus / 1e9 if across else None,
    )


def _measurements(evidence: Evidence) -> list[Facts]:
    """What each rank measured. Raises PrepareError if one did not, or if their devices differ."""
    reports = [(host, one) for host, answers in evidence.bandwidth.items() for one in answers]
    for host, report in reports:
        if report["failed"]:
            raise PrepareError(
                host,
                ATTEMPTED,
                report["error"],
                hint="find what is wrong with the hosts: dtrain check FILE --bandwidth",
            )
    silent = [host for host, report in reports if "compute" not in report]
    if silent or not reports:
        raise PrepareError(
            silent[0] if silent else evidence.plan.hosts[0].host.name,
            ATTEMPTED,
            "it reports no measurement",
            hint="`probe` does not measure in containers; plan without it",
        )
    first, device = reports[0][0], reports[0][1]["compute"]["device"]
    for host, report in reports:
        other = report["compute"]["device"]
        if other != device:
            raise PrepareError(
                host,
                ATTEMPTED,
                f"it has {other}, and {first} has {device}",
                hint="a layout needs equal devices: list only equal hosts",
            )
    return [report["compute"] for _, report in reports]


def _equal_ranks(evidence: Evidence) -> tuple[str, int]:
    """The first host, and the number of ranks of each host. Raises PrepareError."""
    first, ranks = next((host, len(answers)) for host, answers in evidence.bandwidth.items())
    for host, answers in evidence.bandwidth.items():
        if len(answers) != ranks:
            raise PrepareError(
                host,
                ATTEMPTED,
                f"it has {counted(len(answers), 'rank')}, and {first} has {ranks}",
                hint="a layout needs equal hosts: list only equal hosts",
            )
    return first, ranks


def _slowest(reports: list[Facts], name: str) -> tuple[tuple[int, float], ...]:
    """The sizes that all ranks measured, with the speed of the slowest."""
    speeds = [dict(report["precision"].get(name, ())) for report in reports]
    sizes = sorted(set.intersection(*map(set, speeds)))
    return tuple((size, min(each[size] for each in speeds)) for size in sizes)
