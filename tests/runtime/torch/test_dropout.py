"""Which ranks drop the same, and that a resumed run drops what an undisturbed one does."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from dtrain.runtime.torch.dropout import Draws
from runtime.torch.ranks import HERE, run

pytestmark = pytest.mark.torch
Masks = list[dict[str, list[str]]]


def masks(folder: Path, world: int, steps: int = 2, **layout: Any) -> list[Masks]:
    """By rank, for each step, by place: the mask of each call."""
    said = run(world, HERE / "dropout_job.py", json.dumps(layout), folder, steps)
    return [json.loads(text.splitlines()[-1]) for text in said]


def once(step: dict[str, list[str]]) -> dict[str, list[str]]:
    return {place: list(dict.fromkeys(calls)) for place, calls in step.items()}


def test_tensor_ranks_drop_the_same_of_the_residual_stream_alone(tmp_path: Path) -> None:
    """Each has its own heads and features, but all have the same stream."""
    first, second = masks(tmp_path, 2, tensor=2)
    for one, other in zip(first, second, strict=True):
        for place in ("embedding", "stream", "between"):
            assert one[place] == other[place]
        assert not {*one["inside"]} & {*other["inside"]}


def test_sequence_parallel_ranks_drop_different_tokens(tmp_path: Path) -> None:
    first, second = masks(tmp_path, 2, tensor=2, sequence_parallel=True)
    for one, other in zip(first, second, strict=True):
        for place in ("embedding", "stream", "inside"):
            assert not {*one[place]} & {*other[place]}
        assert one["between"] == other["between"]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_recomputed_block_drops_the_same_again(
    tmp_path: Path, recompute: str, sequence: bool
) -> None:
    for rank in masks(tmp_path, 2, tensor=2, sequence_parallel=sequence, recompute=recompute):
        for step in rank:
            for place in ("inside", "stream"):
                calls = step[place]
                # Two blocks forward, and again in the opposite order.
                assert calls[2:] == calls[1::-1]
                assert calls[0] != calls[1]


@pytest.mark.parametrize(
    "layout", [{"data": 2}, {"tensor": 2}, {"pipeline": 2, "grad_accumulation": 2}], ids=str
)
def test_a_resumed_run_drops_what_an_undisturbed_one_does(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    whole = masks(tmp_path, 2, steps=3, **layout)
    resumed = masks(tmp_path, 2, steps=3, **layout)
    for undisturbed, rest in zip(whole, resumed, strict=True):
        # In its first step, torch's pipeline runs a stage once more for the shapes.
        assert [once(step) for step in undisturbed[1:]] == [once(step) for step in rest]
        # Each step drops something else.
        assert len({str(step) for step in undisturbed}) == 3


def test_each_gpu_of_a_data_parallel_process_draws_its_own_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With generators of the CPU in place of two GPUs'."""
    generators = (torch.Generator(), torch.Generator())
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    alone = SimpleNamespace(get_local_rank=lambda: 0)
    mesh = dict.fromkeys(("pipeline", "replicate", "shard"), alone)
    seeds = []
    for seed, step in ((1, 0), (1, 1), (2, 0), (1, 0)):
        Draws(seed, cast(DeviceMesh, mesh), torch.device("cpu")).begin(step)
        seeds.append([one.initial_seed() for one in generators])
    assert seeds[3] == seeds[0]
    assert len({number for pair in seeds[:3] for number in pair}) == 6
