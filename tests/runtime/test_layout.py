"""The rules for every layout."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.node.runtime_archive import runtime_archive
from dtrain.runtime.layout import Layout
from dtrain.runtime.layout_rules import contradictions, torch_limits, uneven_rounds
from support.node import oldest_python

ZERO_BUBBLE = Layout(pipeline=4, schedule="zb-v", virtual_pipeline=2, grad_accumulation=8)


@pytest.mark.parametrize(
    ("layout", "key", "unused"),
    [
        (Layout(tensor=4, sharding="full"), "sharding", False),
        (Layout(data=8, sharding="full", shard=4), "shard", True),
        (Layout(data=8, sharding="hybrid", shard=3), "shard", False),
        (Layout(data=8, expert=3), "expert", False),
        (Layout(data=12, expert=6, sharding="hybrid", shard=4), "expert", False),
        (Layout(data=8, sequence_parallel=True), "sequence_parallel", True),
        (Layout(data=8, virtual_pipeline=2), "virtual_pipeline", True),
        (Layout(data=8, schedule="gpipe"), "schedule", True),
    ],
)
def test_contradictions(layout: Layout, key: str, unused: bool) -> None:
    (misfit,) = contradictions(layout)
    assert (misfit.key, misfit.unused) == (key, unused)
    assert misfit.hint


def test_states_and_experts_are_spread_over_data_and_context_ranks() -> None:
    layout = Layout(data=2, context=4, expert=8, sharding="hybrid", shard=8)
    assert not [*contradictions(layout)]
    assert not [*contradictions(Layout(context=2, sharding="optimizer"))]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=2, sharding="full"),
        Layout(data=8, expert=2, sharding="hybrid", shard=4),
        Layout(data=8, expert=4, sharding="hybrid", shard=2),
        Layout(tensor=2, sequence_parallel=True),
        Layout(pipeline=2, schedule="gpipe", virtual_pipeline=2),
    ],
)
def test_layouts_without_a_contradiction(layout: Layout) -> None:
    assert not [*contradictions(layout)]


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (Layout(tensor=2, expert=3), "1 data rank"),
        (Layout(data=2, expert=3), "2 data ranks"),
        (Layout(data=2, context=2, expert=3), "4 data and context ranks"),
    ],
)
def test_the_ranks_that_experts_are_spread_over_are_named(layout: Layout, ranks: str) -> None:
    (misfit,) = contradictions(layout)
    assert str(misfit) == f"expert is 3, which does not divide the {ranks}"


OFFLOAD = Layout(data=2, offload_activations=True)


@pytest.mark.parametrize(
    ("layout", "key", "unused"),
    [
        (OFFLOAD, None, False),
        (replace(OFFLOAD, recompute="selective"), "offload_activations", True),
        (Layout(data=2, recompute="selective"), None, False),
        (Layout(data=2, recompute="selective", expert=2), "recompute", False),
        (Layout(data=2, recompute="full", expert=2), None, False),
        (Layout(pipeline=2, data=2, recompute="full"), None, False),
        (Layout(data=2, recompute="full", schedule="zb-1p"), None, False),
        (replace(ZERO_BUBBLE, data=2), "schedule", False),
        (replace(ZERO_BUBBLE, context=2), "schedule", False),
        (replace(ZERO_BUBBLE, virtual_pipeline=1), "virtual_pipeline", False),
        (replace(ZERO_BUBBLE, schedule="zb-1p", virtual_pipeline=1), None, False),
        (replace(ZERO_BUBBLE, recompute="full"), "recompute", False),
    ],
)
def test_limits_of_torch(layout: Layout, key: str | None, unused: bool) -> None:
    found = [(misfit.key, misfit.unused) for misfit in torch_limits(layout)]
    assert found == ([(key, unused)] if key else [])


def test_a_rule_names_fields_as_its_reader_writes_them() -> None:
    layout = Layout(data=8, virtual_pipeline=2)
    (misfit,) = contradictions(layout, lambda key: f"<{key}>")
    assert str(misfit) == (
        "<virtual_pipeline> splits the stages of a pipeline, but <pipeline> is 1"
    )


@pytest.mark.parametrize(
    ("layout", "rest"),
    [
        (Layout(pipeline=4, virtual_pipeline=2, grad_accumulation=6), 1),
        (Layout(pipeline=4, schedule="zb-1p", grad_accumulation=6), 1),
        (Layout(pipeline=4, grad_accumulation=6), 0),
        (ZERO_BUBBLE, 0),
    ],
)
def test_interleaved_schedules_need_whole_rounds(layout: Layout, rest: int) -> None:
    assert [misfit.key for misfit in uneven_rounds(layout)] == ["grad_accumulation"] * rest


def test_the_runtime_and_its_rules_work_on_the_oldest_python(tmp_path: Path) -> None:
    assert not [*torch_limits(ZERO_BUBBLE)]
    archive = tmp_path / "runtime.zip"
    archive.write_bytes(runtime_archive())
    script = (
        "from dtrain.runtime import current_job\n"
        "from dtrain.runtime.layout_rules import torch_limits\n"
        "print([misfit.key for misfit in torch_limits(current_job().layout)])\n"
    )
    layout = '{"pipeline": 2, "data": 2, "schedule": "zb-v", "recompute": "full"}'
    done = subprocess.run(
        [oldest_python(), "-c", script],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(archive), "DTRAIN_LAYOUT": layout},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['schedule', 'virtual_pipeline', 'recompute']\n"
