"""The job as a script sees it."""

from __future__ import annotations

import json

import pytest

from dtrain.launchplan.build import build
from dtrain.runtime import JobSettings, Layout, Training, current_job
from dtrain.spec.load import parse

FILE = """
cluster: {hosts: [a, b], gpus: 4}
job:
  framework: torch
  strategy: 3d
  script: train.py
  layout: {tensor: 2, pipeline: 2, data: 2, sharding: full, micro_batch: 3, grad_accumulation: 4}
  training: {precision: bf16, seq_len: 512}
"""


def test_a_script_reads_the_settings_of_the_cluster_file() -> None:
    plan = build(parse(FILE, "cluster.yaml"))
    job = current_job(plan.hosts[1].environment)
    layout = Layout(
        tensor=2, pipeline=2, data=2, sharding="full", micro_batch=3, grad_accumulation=4
    )
    # The file sets grad_accumulation, which determines the global batch.
    training = Training(global_batch=24, precision="bf16", seq_len=512)
    assert job == JobSettings("3d", layout, training)
    assert (layout.world_size, layout.global_batch) == (8, 24)


def test_a_script_on_its_own() -> None:
    assert current_job({}) == JobSettings(None, None, Training())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "DTRAIN_LAYOUT is not JSON"),
        ("[1]", "must be a JSON object"),
        (json.dumps({"tensors": 2}), "unknown keys: tensors"),
    ],
)
def test_a_broken_environment_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        current_job({"DTRAIN_LAYOUT": text})
