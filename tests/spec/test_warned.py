"""The warnings for each cluster file that launches, but badly (golden)."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.spec.advice import RACK_NAMES, RACKS
from dtrain.spec.load import parse
from dtrain.spec.report import render_warnings

FOLDER = Path(__file__).parent / "warned"
CASES = sorted(FOLDER.glob("*.yaml"))
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_warnings(case: Path, golden: Callable[[str, Path], None]) -> None:
    spec = parse(case.read_bytes(), case.name)
    report = render_warnings(spec.warnings)
    assert report.startswith(f"warning: {case.name}:")
    golden(report, case.with_suffix(".txt"))


def test_every_reference_has_a_case() -> None:
    assert {case.stem for case in CASES} == {path.stem for path in FOLDER.glob("*.txt")}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_files_have_no_warnings(path: Path) -> None:
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
def test_good_layouts_have_no_warnings(layout: str) -> None:
    text = (
        "cluster: {hosts: [a, b], gpus: 8, network: {gbps: 400}}\n"
        f"job: {{framework: torch, strategy: none, script: t.py, layout: {{{layout}}}}}"
    )
    spec = parse(text, "c.yaml")
    # Context ranks come after the tensor ranks, so these context groups cross hosts.
    assert bool(spec.warnings) == ("context: 2" in layout)


def test_groups_do_not_cross_hosts_on_one_machine() -> None:
    text = (
        "cluster: {hosts: [a, b], gpus: 0, slots: 2, transport: local}\n"
        "job: {framework: torch, strategy: tensor, script: t.py, layout: {tensor: 4}}"
    )
    assert parse(text, "c.yaml").warnings == ()


@pytest.mark.parametrize(
    "fast", [*RACKS, "GB200-NVL72", "VR200", "Instinct MI455X", "tpu-v6e, network: {gbps: 6400}"]
)
def test_groups_may_cross_hosts_where_that_is_as_fast_as_nvlink(fast: str) -> None:
    text = (
        f"cluster: {{hosts: [a, b], gpus: 2, gpu: {fast}}}\n"
        "job: {framework: torch, strategy: tensor, script: t.py, layout: {tensor: 4}}"
    )
    assert parse(text, "c.yaml").warnings == ()


def test_racks_are_those_of_the_planner() -> None:
    gpus = hardware().gpus
    assert [gpu.name for gpu in gpus if gpu.domain > 1] == list(RACKS)
    for gpu in gpus:
        for name in (gpu.name, *gpu.aliases):
            assert any(part in name.lower() for part in RACK_NAMES) == (gpu.domain > 1)
