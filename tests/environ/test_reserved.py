"""The names that a cluster file may not set are those that launches set."""

from __future__ import annotations

from dtrain.launchplan.build import build
from dtrain.spec.load import parse
from dtrain.spec.variables import RESERVED

TORCH = """
cluster: {hosts: [a, b], gpus: 2}
job:
  framework: torch
  strategy: ddp
  script: train.py
  rendezvous: {backend: direct}
  layout: {data: 4}
  training: {global_batch: 4}
"""
TENSORFLOW = """
cluster: {hosts: [a, b], gpus: 2}
job: {framework: tensorflow, script: train.py, roles: {worker: 2}}
"""


def test_every_reserved_variable_is_set_by_a_launch() -> None:
    names: set[str] = set()
    for text in (TORCH, TENSORFLOW):
        for part in build(parse(text, "job.yaml")).hosts:
            names |= {*part.environment, *part.node_variables}
            for process in part.processes:
                names |= {*process.environment, *process.node_variables}
    assert RESERVED.keys() <= names
