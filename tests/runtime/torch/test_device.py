"""The device of a rank, from its environment and torch."""

from __future__ import annotations

import os

import pytest
import torch

from dtrain.runtime.layout import Layout
from dtrain.runtime.torch.cores import share
from dtrain.runtime.torch.run import ParallelRun, _device, init

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("gpus", "local_rank", "index"),
    [(4, 0, 0), (4, 3, 3), (1, 0, 0), (1, 3, 0)],
    ids=["first", "last", "alone", "one shown to each rank"],
)
def test_each_rank_has_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: int, local_rank: int, index: int
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    assert _device(None) == torch.device("cuda", index)
    assert chosen == [index]


def test_a_rank_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="local rank 2 has no GPU of its own: this host shows 2"):
        _device(None)


@pytest.mark.parametrize("named", ["0,1", "GPU-8f2c", "MIG-41d0"])
def test_gpus_that_torch_does_not_see_are_not_replaced_by_the_cpu(
    monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(ValueError, match=rf"{named}', but .* is built without CUDA; install"):
        _device(None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(ValueError, match="check that nvidia-smi lists them"):
        _device(None)
    assert _device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("named", ["", "-1", "NoDevFiles"])
def test_no_gpu_means_the_cpu(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert _device(None) == torch.device("cpu")


@pytest.mark.parametrize(("given", "shared"), [("1", True), ("3", False)])
def test_the_cores_of_the_host_update_offloaded_states(
    monkeypatch: pytest.MonkeyPatch, given: str, shared: bool
) -> None:
    """Unless the user has chosen the threads: a launcher sets 1."""
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(12))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with init(device="cpu", layout=Layout(offload=True)):
            assert torch.get_num_threads() == (12 if shared else 3)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("bound", "threads"),
    [
        ([range(16)] * 4, 4),
        ([range(8), range(8), range(8, 16), range(8, 16)], 4),
        ([range(rank * 3, rank * 3 + 3) for rank in range(4)], 3),
        # Slurm gives a job without `slurm.cpus` one core for each rank, and binds none to it.
        ([range(4)] * 4, 1),
        ([range(2)] * 4, 1),
        ([range(8)] * 3, 2),
    ],
    ids=["none", "to a NUMA node", "to its own", "part of a host", "too few", "a remainder"],
)
def test_ranks_share_the_cores_that_they_may_use(bound: list[range], threads: int) -> None:
    ranks = [("here", set(cores)) for cores in bound]
    other = [("there", set(cores)) for cores in bound]
    assert share(ranks[0], [*ranks, *other]) == threads


@pytest.mark.parametrize(("kind", "closes"), [("cpu", True), ("cuda", False)])
def test_an_error_does_not_wait_for_other_gpus(
    monkeypatch: pytest.MonkeyPatch, kind: str, closes: bool
) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(ParallelRun, "close", lambda _: closed.append(True))
    run = object.__new__(ParallelRun)
    run.device = torch.device(kind)
    with pytest.raises(KeyError), run:
        raise KeyError
    assert bool(closed) == closes
    with run:
        closed.clear()
    assert closed
