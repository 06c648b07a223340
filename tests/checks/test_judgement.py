"""Findings that no recorded machine has: ties, folding, groups, clocks, logs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain.checks import Evidence, Finding, HostFacts
from dtrain.checks.finding import HOSTS, error, fold, warning
from dtrain.checks.judgement import before_launch, judge
from dtrain.checks.reach import groups
from dtrain.checks.skew import outliers
from dtrain.diagnostics import ConnectError, HostKeyError
from dtrain.launchplan.build import build
from dtrain.launchplan.plan import LaunchPlan
from dtrain.session.facts.gather_order import QUICK, peers
from dtrain.spec.load import parse
from dtrain_cli.views.findings import as_json, as_text
from dtrain_cli.views.paper import Paper

FILE = """
cluster:
  hosts: ["gpu[01-{count:02}]"]
  gpus: {gpus}
job: {{framework: torch, script: train.py}}
"""


def plan_of(count: int, gpus: int = 0) -> LaunchPlan:
    return build(parse(FILE.format(count=count, gpus=gpus), "cluster.yaml"))


def cluster(count: int, gpus: int = 0, **facts: dict[str, Any]) -> list[HostFacts]:
    return [HostFacts(part, dict(facts)) for part in plan_of(count, gpus).hosts]


def findings(hosts: list[HostFacts], gpus: int = 0) -> tuple[Finding, ...]:
    plan = build(parse(FILE.format(count=len(hosts), gpus=gpus), "cluster.yaml"))
    return judge(Evidence(plan, tuple(hosts)))


def at(host: HostFacts, offset: float, error: float = 0.001) -> HostFacts:
    return HostFacts(host.part, host.facts, clock_offset=offset, clock_error=error)


def test_hosts_without_facts_cause_no_findings() -> None:
    assert findings(cluster(3)) == ()


@pytest.mark.parametrize(
    ("gpu", "remedies"),
    [
        ("h100-80g", ["did you mean h100-80gb? `dtrain help models` lists those of the table"]),
        ("my-own", ["`dtrain help models` lists those of the table"]),
        ("H100 SXM", []),
    ],
)
def test_a_gpu_that_the_planner_does_not_know(gpu: str, remedies: list[str]) -> None:
    file = FILE.format(count=2, gpus=0).replace("gpus: 0", f"gpus: 0\n  gpu: {gpu}")
    evidence = Evidence(build(parse(file, "cluster.yaml")), ())
    found = judge(evidence)
    assert before_launch(evidence) == ()
    assert [finding.remedy for finding in found] == remedies
    for finding in found:
        assert finding.seen == f"{gpu!r} is not a GPU that dtrain knows"
        assert finding.hosts == ("gpu01", "gpu02")


def test_folding_merges_findings_and_sorts_the_worst_first() -> None:
    found = [
        warning("mtu", ["b"], "MTU 1400", "1500", f"set {HOSTS}"),
        error("port", ["c"], "taken", "free", "stop it"),
        warning("mtu", ["a"], "MTU 1400", "1500", f"set {HOSTS}"),
    ]
    folded = fold(found, ["a", "b", "c"])
    assert [(one.subject, one.hosts, one.remedy) for one in folded] == [
        ("port", ("c",), "stop it"),
        ("mtu", ("a", "b"), "set a,b"),
    ]


def test_a_minority_is_reported_and_a_tie_reports_all() -> None:
    (minority,) = outliers({"a": "1", "b": "2", "c": "1"})
    assert (minority.hosts, minority.seen, minority.usual) == (("b",), "2; 1 on a,c", "1")
    (tie,) = outliers({"a": "1", "b": "2"})
    assert (tie.hosts, tie.seen) == (("a", "b"), "1 on a; 2 on b")
    assert list(outliers({"a": "1", "b": "1"})) == []
    assert list(outliers({})) == []


@pytest.mark.parametrize(
    ("failed", "expected"),
    [
        ([("a", "b")], ["a and b"]),
        ([("a", "b"), ("b", "a")], ["a and b"]),
        ([(x, "c") for x in "abd"], ["c and any other host"]),
        ([(x, y) for x in "ab" for y in "cd"], ["a,b and c,d"]),
        ([(x, y) for x in "abcd" for y in "abcd" if x != y], ["a,b,c,d and any other host"]),
        ([], []),
        ([("a", "a"), ("a", "?")], []),
    ],
)
def test_pairs_are_reported_as_groups(failed: list[tuple[str, str]], expected: list[str]) -> None:
    assert [str(group) for group in groups("abcd", failed)] == expected


MANY = [f"n{number}" for number in range(100)]
TRIED = {(one, other) for at, one in enumerate(MANY) for other in peers(MANY, at, QUICK)}


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        (lambda pair: "n50" in pair, ["n50 and any other host"]),
        (lambda pair: "n0" in pair, ["n0 and any other host"]),
        (lambda pair: (pair[0] in MANY[:50]) != (pair[1] in MANY[:50]), ["n[0-49] and n[50-99]"]),
        (lambda pair: True, ["n[0-99] and any other host"]),
    ],
    ids=["one host", "the first host", "two networks", "all"],
)
def test_pairs_of_many_hosts_are_groups_although_few_were_tried(
    fails: Callable[[tuple[str, str]], bool], expected: list[str]
) -> None:
    failed = {pair for pair in TRIED if fails(pair)}
    assert [str(group) for group in groups(MANY, failed, TRIED)] == expected


def test_a_clock_is_compared_with_most_others() -> None:
    ahead = [at(host, 500.0) for host in cluster(3)]
    # All hosts agree and only the launching machine differs: no host is wrong.
    assert findings(ahead) == ()
    first, second, third = cluster(3)
    (found,) = findings([at(first, 0.0), at(second, 3.0), at(third, 0.1)])
    assert (found.subject, found.hosts) == ("clock", ("gpu02",))
    assert found.severity.value == "warning"
    (found,) = findings([at(first, 0.0), at(second, -4000.0), at(third, 0.1)])
    assert "67 min behind" in found.seen
    # An offset within the error of a slow connection is not a finding.
    assert findings([at(first, 0.0), at(second, 3.0, error=2.0), at(third, 0.1)]) == ()


def test_xids_in_the_log() -> None:
    gpus = {"tool": "nvidia-smi", "gpus": [], "xids": {"0000:07:00 79": 1, "0000:07:00 31": 4}}
    hosts = cluster(1, gpus=1)
    hosts = [HostFacts(host.part, {"gpus": gpus}) for host in hosts]
    found_texts = [found.seen for found in findings(hosts, gpus=1)]
    assert any("Xid 79 (the GPU has fallen off the bus)" in text for text in found_texts)
    assert not any("Xid 31" in text for text in found_texts)


@pytest.mark.parametrize(
    ("buses", "severities"),
    [
        (["00000000:07:00.0", "00000000:3B:00.0"], ["error"]),
        (["00000000:3B:00.0", "00000000:07:00.0"], []),
        (["00000000:3B:00.0", None], ["warning"]),
    ],
    ids=["used", "left out", "unknown"],
)
def test_a_gpu_off_the_bus_is_an_error_if_the_job_uses_it(
    buses: list[str | None], severities: list[str]
) -> None:
    healthy = {"name": "A100", "memory": 80 << 30, "used": 0, "slowed": [], "processes": []}
    found = [healthy | {"index": index, "bus": bus} for index, bus in enumerate(buses)]
    gpus = {"tool": "nvidia-smi", "gpus": found, "xids": {"0000:07:00 79": 1}}
    (host,) = cluster(1, gpus=1)
    found_texts = [
        one.severity.value
        for one in findings([HostFacts(host.part, {"gpus": gpus})], gpus=1)
        if "Xid 79" in one.seen
    ]
    assert found_texts == severities


def test_a_failed_probe_is_reported() -> None:
    (found,) = findings(cluster(2, storage={"error": "no answer within 20 s"}))
    assert (found.subject, found.hosts) == ("storage", ("gpu01", "gpu02"))
    assert "no answer within 20 s" in found.seen


def test_text_from_hosts_is_cleaned_for_the_terminal() -> None:
    plan = build(parse(FILE.format(count=1, gpus=0), "cluster.yaml"))
    evil = ConnectError("gpu01", "connecting", "\x1b]0;title\x07\x1b[2Jno\nroute", hint="\x9b31m")
    evidence = Evidence(plan, (), (evil,))
    text = as_text(evidence, judge(evidence), 1.0, Paper(100, color=False, unicode=True))
    assert text.replace("\n", " ").isprintable()
    assert "no route" in text


def test_a_finding_names_all_its_hosts() -> None:
    hosts = [f"ip-10-{number}-253-{9 * number}.us-west-2.compute.internal" for number in range(9)]
    found = warning("storage", hosts, "full", "", "")
    assert ",".join(hosts) in as_text(
        Evidence(plan_of(1), ()), [found], 1.0, Paper(100, color=False, unicode=True)
    )


def test_text_from_hosts_that_no_encoding_has_is_escaped_in_json() -> None:
    plan = plan_of(1)
    host = HostFacts(plan.hosts[0], {"machine": {"hostname": "\ud83d"}})
    assert r"\ud83d" in as_json(Evidence(plan, (host,)), ())


def test_the_examples_have_no_findings() -> None:
    """Plans of the shipped cluster files can be checked."""
    for path in sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")):
        plan = build(parse(path.read_bytes(), str(path)))
        assert judge(Evidence(plan, tuple(HostFacts(part, {}) for part in plan.hosts))) == ()


def test_hosts_that_fail_alike_are_one_finding() -> None:
    plan = plan_of(3)
    failures = tuple(
        ConnectError(name, f"connecting to {name} ({name}:22)", why, hint=f"check `ssh {name}`")
        for name, why in (("gpu01", "refused"), ("gpu02", "no route"), ("gpu03", "refused"))
    )
    found = judge(Evidence(plan, (), failures))
    assert [(one.hosts, one.seen) for one in found] == [
        (
            ("gpu01", "gpu03"),
            "connecting to gpu01 (gpu01:22): refused (shown for gpu01; same on the others)",
        ),
        (("gpu02",), "connecting to gpu02 (gpu02:22): no route"),
    ]


def test_unknown_keys_are_one_finding_with_each_fingerprint() -> None:
    failures = tuple(
        HostKeyError(name, f"connecting to {name}", f"unknown: {key}", hint=f"run `ssh {name}`")
        for name, key in (("gpu01", "SHA256:a"), ("gpu02", "SHA256:b"))
    )
    (found,) = judge(Evidence(plan_of(2), (), failures))
    assert found.hosts == ("gpu01", "gpu02")
    assert found.seen == (
        "connecting to gpu01: unknown: SHA256:a; connecting to gpu02: unknown: SHA256:b"
    )
    assert found.remedy == "run `ssh gpu01` (shown for gpu01; same on the others)"


def test_a_key_that_stops_all_hosts_is_shown_once() -> None:
    failures = tuple(
        HostKeyError(name, f"connecting to {name}", "bastion: unknown: SHA256:a", hint="run it")
        for name in ("gpu01", "gpu02")
    )
    (found,) = judge(Evidence(plan_of(2), (), failures))
    assert found.hosts == ("gpu01", "gpu02")
    assert found.seen == (
        "connecting to gpu01: bastion: unknown: SHA256:a (shown for gpu01; same on the others)"
    )
    assert found.remedy == "run it"


def test_the_work_grows_with_the_pairs_of_hosts_and_not_faster() -> None:
    """A closed firewall, and names that lead to other hosts, between all pairs."""

    def calls(count: int) -> int:
        names = [host.name for host in cluster(count)]
        resolved = {name: {"addresses": ["10.9.9.9"]} for name in names}
        hosts = [
            replace(
                one,
                facts={"names": {"hosts": resolved}, "network": on_network(f"10.0.0.{at}")},
                dialed=tuple(
                    {"host": name, "kind": kind, "address": "x", "port": 1, "error": "timed out"}
                    for name in names
                    for kind in ("address", "interface")
                    if name != one.name
                ),
            )
            for at, one in enumerate(cluster(count), 1)
        ]
        evidence = Evidence(plan_of(count), tuple(hosts))
        made = 0

        def note(*_: object) -> None:
            nonlocal made
            made += 1

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            assert judge(evidence)
        finally:
            sys.setprofile(before)
        return made

    assert calls(48) < 5 * calls(24)


def on_network(address: str) -> dict[str, Any]:
    eth0 = {"addresses": [address], "up": True, "state": "up", "mtu": 1500, "speed": 1000}
    return {"interfaces": {"eth0": eth0}, "routes": {}}
