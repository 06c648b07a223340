"""Links wait for each other while their hosts are checked."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dtrain.checks import Finding
from dtrain.launchplan.plan import LaunchPlan, build
from dtrain.session.inspection import Inspection
from dtrain.spec.load import parse
from dtrain.transport.local import LocalTransport
from support.limits import HANG

FAKE = Path(__file__).parent / "fakes" / "torch-2.13.0"
FILE = """
cluster: {hosts: [here, there, gone], gpus: 0, transport: local}
job: {framework: torch, script: SCRIPT, env: {PYTHONPATH: FAKE}}
"""


def plan(script: Path) -> LaunchPlan:
    text = FILE.replace("SCRIPT", str(script)).replace("FAKE", str(FAKE))
    return build(parse(text, "cluster.yaml"), local_python="python3")


def inspect(script: Path, *, close: bool = False) -> tuple[Inspection, list[bool], list[Finding]]:
    """Two of three hosts arrive. The third one never does, or all are released before."""
    found: list[Finding] = []

    def report(findings: Sequence[Finding]) -> None:
        found.extend(findings)

    plan_ = plan(script)
    inspection = Inspection(plan_, ["here", "there"], base=script.parent, report=report)
    assert inspection.late == {"here", "there", "gone"}
    connections = [LocalTransport().connect(part.host) for part in plan_.hosts[:2]]
    with ThreadPoolExecutor() as pool:
        waiting = [
            pool.submit(inspection.check_host, part.host.name, connection)
            for part, connection in zip(plan_.hosts, connections, strict=False)
        ]
        if close:
            inspection.close()
        else:
            inspection.drop("gone")
        answers = [one.result(HANG) for one in waiting]
    for connection in connections:
        connection.close()
    return inspection, answers, found


def test_no_link_waits_for_a_host_that_cannot_arrive(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    inspection, answers, found = inspect(script)
    assert answers == [False, False]
    assert found == []
    assert inspection.late == frozenset()


def test_one_error_stops_all(tmp_path: Path) -> None:
    inspection, answers, found = inspect(tmp_path / "gone.py")
    assert answers == [False, False]
    assert [one.subject for one in found] == ["script"]
    assert inspection.errors == tuple(found)
    assert inspection.failing_newcomers == {"here", "there"}


def test_waiting_links_can_be_released(tmp_path: Path) -> None:
    inspection, answers, found = inspect(tmp_path / "train.py", close=True)
    assert answers == [False, False]
    assert found == []
    assert inspection.errors == ()
