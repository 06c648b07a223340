"""Cluster files that launch, but not well: for each, the warnings that a user sees (golden)."""

from pathlib import Path

import pytest

from dtrain.spec.load import parse
from dtrain.spec.report import render_warnings

FOLDER = Path(__file__).parent / "warned"
CASES = sorted(FOLDER.glob("*.yaml"))
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_warnings(case: Path, update_golden: bool) -> None:
    spec = parse(case.read_bytes(), case.name)
    report = render_warnings(spec.warnings)
    assert report.startswith(f"warning: {case.name}:")
    reference = case.with_suffix(".txt")
    if update_golden:
        reference.write_text(report, encoding="utf-8")
    assert report == reference.read_text(encoding="utf-8")


def test_there_are_no_references_without_a_case() -> None:
    assert {case.stem for case in CASES} == {path.stem for path in FOLDER.glob("*.txt")}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_files_give_no_cause(path: Path) -> None:
    assert parse(path.read_bytes(), path.name).warnings == ()


@pytest.mark.parametrize(
    "layout",
    [
        "tensor: 4, pipeline: 2, data: 2",
        "tensor: 8, context: 2",
        "pipeline: 4, data: 4, sharding: optimizer, virtual_pipeline: 2, grad_accumulation: 8",
        "data: 16, sharding: hybrid, shard: 8",
    ],
)
def test_what_is_well_is_not_warned_of(layout: str) -> None:
    text = (
        "cluster: {hosts: [a, b], gpus: 8, network: {gbps: 400}}\n"
        f"job: {{framework: torch, strategy: none, script: t.py, layout: {{{layout}}}}}"
    )
    spec = parse(text, "c.yaml")
    # Context ranks lie outside the tensor ranks of a host: two hosts' worth of them do cross.
    assert bool(spec.warnings) == ("context: 2" in layout)


def test_nothing_crosses_hosts_that_are_one_machine() -> None:
    text = (
        "cluster: {hosts: [a, b], gpus: 0, slots: 2, transport: local}\n"
        "job: {framework: torch, strategy: tensor, script: t.py, layout: {tensor: 4}}"
    )
    assert parse(text, "c.yaml").warnings == ()
