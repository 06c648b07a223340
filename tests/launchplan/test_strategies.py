"""Dry runs of every strategy, with the reason of a choice and warnings (golden)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dtrain.launchplan.build import build
from dtrain.runtime.job import current_job
from dtrain.spec.load import parse
from dtrain.spec.report import render_warnings
from dtrain.spec.strategies import STRATEGIES
from dtrain_cli.commands.launch import launch
from dtrain_cli.dry_run import rendered
from dtrain_cli.views.plan import as_text
from support.specs import read

FOLDER = Path(__file__).parent / "strategies"
CASES = sorted(FOLDER.glob("*.yaml"))

MINIMAL = """\
cluster: {{hosts: {hosts}, gpus: 1}}
job: {{framework: {framework}, strategy: "{strategy}", script: t.py{more}}}
"""
NEEDS = {
    "3d": ", layout: {tensor: 2}",
    "hsdp": ", layout: {shard: 2}",
    "parameter_server": ", roles: {chief: 1, worker: 1, ps: 1}",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_golden(case: Path, golden: Callable[[str, Path], None]) -> None:
    spec = parse(case.read_bytes(), case.name)
    shown = as_text(build(spec)) + render_warnings(spec.warnings)
    golden(shown, case.with_suffix(".txt"))


def test_every_strategy_has_a_case() -> None:
    known = {f"{framework}-{name}" for framework, names in STRATEGIES.items() for name in names}
    have = {case.stem for case in CASES}
    assert {name for name in known - have if not name.endswith("-auto")} == set()
    assert {case.stem for case in FOLDER.glob("*.txt")} == have


@pytest.mark.parametrize(
    ("framework", "strategy"),
    [(framework, name) for framework, names in STRATEGIES.items() for name in names],
)
def test_every_strategy_runs_from_a_minimal_file(framework: str, strategy: str) -> None:
    hosts = "[a]" if STRATEGIES[framework][strategy].single_host else "[a, b]"  # type: ignore[index]
    text = MINIMAL.format(
        hosts=hosts if strategy != "tpu" else "[a]",
        framework=framework,
        strategy=strategy,
        more=NEEDS.get(strategy, ""),
    )
    plan = build(parse(text, "c.yaml"))
    assert plan.world_size >= 1
    for host in plan.hosts:
        for process in host.processes:
            job = current_job({**host.environment, **process.environment})
            assert job.strategy in STRATEGIES[framework]  # type: ignore[index]
            assert job.strategy != "auto"
            if framework == "torch" and job.strategy not in ("none", "data_parallel"):
                assert job.layout is not None
                assert job.layout.world_size == plan.world_size


def test_the_chosen_strategy_is_in_the_json(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(MINIMAL.format(hosts="[a, b]", framework="torch", strategy="auto", more=""))
    shown = json.loads(rendered(build(read(file)), json=True))
    assert shown["strategy"] == "ddp"
    assert "has to fit on one GPU" in shown["strategy_reason"]
    assert shown["layout"]["data"] == 2
    assert read(file).job.strategy_reason == shown["strategy_reason"]


def test_warnings_go_only_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    text = MINIMAL.format(hosts="[a, b]", framework="torch", strategy="tensor", more="")
    file.write_text(text)
    launch(file, dry_run=True)
    out, err = capsys.readouterr()
    assert "warning" not in out
    assert err == render_warnings(read(file).warnings)
    assert err.startswith(f"warning: {file}:2:")
