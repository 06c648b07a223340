"""Which GPUs decide where a process is bound."""

from __future__ import annotations

import pytest

from dtrain.launchplan.build import build
from dtrain.spec.load import parse

TORCH = "framework: torch, script: train.py"
TENSORFLOW = "framework: tensorflow, script: train.py"


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (TORCH, [(4,), (6,)]),
        (f"{TORCH}, binding: none", [(), ()]),
        (f"{TORCH}, per: host", [(4, 6)]),
        (f"{TORCH}, rendezvous: {{backend: static}}", [(4, 6)]),
        (f"{TENSORFLOW}, roles: {{worker: 2, evaluator: 1}}", [(4,), (6,), ()]),
        (f"{TORCH}, container: {{image: x, engine: podman}}", [(4,), (6,)]),
        (f"{TORCH}, container: {{image: x, engine: docker}}", [(), ()]),
        # The file's own choice of GPUs.
        (f'{TORCH}, env: {{CUDA_VISIBLE_DEVICES: "3,2"}}', [(3,), (2,)]),
        (f'{TORCH}, env: {{CUDA_VISIBLE_DEVICES: "{{local_rank}}"}}', [(0,), (1,)]),
        (f"{TORCH}, env: {{CUDA_VISIBLE_DEVICES: GPU-8f2a}}", [(), ()]),
        (f'{TORCH}, env: {{HIP_VISIBLE_DEVICES: "1,0"}}', [(), ()]),
    ],
)
def test_gpus(job: str, expected: list[tuple[int, ...]]) -> None:
    file = f"cluster: {{hosts: [gpu01], gpus: [4, 6]}}\njob: {{{job}}}"
    (part,) = build(parse(file, "cluster.yaml")).hosts
    assert [process.bound_to_gpus for process in part.processes] == expected
