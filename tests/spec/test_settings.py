"""Settings of the command line, `--set KEY=VALUE`, as a part of the cluster file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dtrain.diagnostics import SpecError
from dtrain.spec.load import parse, position, read_to_plan
from dtrain.spec.model import ClusterFile
from dtrain.spec.report import render_problems

FILE = """\
cluster:
  hosts: ["gpu[01-04]"]
  gpus: 8
  overrides: {"gpu[01-04]": {port: 222}, gpu03: {user: ml}}
job:
  framework: torch
  script: train.py
  env: &shared {A: "1"}
  restart:
  watchdog: {silence: 10m}
"""


def changed(*settings: str, file: str = FILE) -> ClusterFile:
    return parse(file, "c.yaml", settings)


@pytest.mark.parametrize(
    ("settings", "value", "expected"),
    [
        (["job.grace=1m"], lambda file: file.job.grace, 60),
        (["job.grace=1m", "job.grace=2m"], lambda file: file.job.grace, 120),
        (["job.env.LR=3e-4"], lambda file: file.job.env, {"A": "1", "LR": "3e-4"}),
        (["job.env.A=a=b"], lambda file: file.job.env, {"A": "a=b"}),
        (["job.env.A=null"], lambda file: file.job.env, {}),
        (['job.env.A="null"'], lambda file: file.job.env, {"A": "null"}),
        (["job.env={B: 2}"], lambda file: file.job.env, {"B": "2"}),
        (["job.restart.max=3"], lambda file: file.job.restart.max, 3),
        (["job.sync.source=."], lambda file: file.job.sync.source, "."),
        (["job.watchdog=null"], lambda file: file.job.watchdog.silence, None),
        (["job.watchdog.silence=~", "job.watchdog=null"], lambda file: file.job.restart.max, 0),
        (["job.setup=null"], lambda file: file.job.setup, ()),
        (['job.setup="a\\nb"'], lambda file: file.job.setup, ("a\nb",)),
        (['job.args=[--epochs, "3"]'], lambda file: file.job.args, ("--epochs", "3")),
        (
            ["cluster.hosts=gpu[01-02]", "cluster.overrides.gpu02.gpus=4"],
            lambda file: [len(host.gpus) for host in file.cluster.hosts],
            [8, 4],
        ),
    ],
)
def test_values(
    settings: list[str], value: Callable[[ClusterFile], object], expected: object
) -> None:
    assert value(changed(*settings)) == expected


@pytest.mark.parametrize("value", ["[]", "null"])
def test_overrides_of_spares_may_stay_when_settings_remove_the_spares(value: str) -> None:
    file = FILE.replace("  gpus: 8\n", "  gpus: 8\n  spares: [gpu05]\n").replace("gpu03:", "gpu05:")
    assert len(changed(file=file).cluster.spares) == 1
    assert changed(f"cluster.spares={value}", file=file).cluster.spares == ()


def test_all_problems_of_the_file_and_of_settings_are_reported_together(
    golden: Callable[[str, Path], None],
) -> None:
    with pytest.raises(SpecError) as caught:
        changed(
            "job.grce=30s",
            "restart.max=3",
            "job.wachdog=null",
            "job.setup=|\n  a",
            "job.restart.max=many",
            "job.grace",
            "job.args=[a",
            "job.env.B=\x1b",
            "job.env.RANK=0",
            "cluster.spares=gpu04",
            "cluster.hosts=gpu[01-02]",
            "cluster.overrides.gpu05.gpus=4",
            "job.sync=null",
            "job.sync=",
            file=FILE.replace("train.py", ""),
        )
    golden(render_problems(caught.value), Path(__file__).with_suffix(".txt"))


def test_the_place_of_a_key() -> None:
    settings = ("job.grace=1m", "job.restart={max: 3}")
    assert position(FILE, "c.yaml", settings, "job.restart") == "--set:2:5"
    assert position(FILE, "c.yaml", settings, "job.script") == "c.yaml:7:3"


def test_the_planner_reads_the_layout_with_settings(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(FILE)
    settings = ("job.strategy=fsdp", "job.layout={tensor: 2, micro_batch: 4}")
    spec, *found = read_to_plan(path, settings, ("micro_batch", "reduce"))
    assert spec.job.layout is None
    assert found == ["fsdp", {"micro_batch": 4}]
