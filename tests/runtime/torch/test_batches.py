"""Every layout uses the same samples in the same steps."""

from __future__ import annotations

import random
from itertools import chain, islice

import pytest
import torch

from dtrain.runtime.torch.batches import Batches

pytestmark = pytest.mark.torch


class Squares:
    def __init__(self, count: int = 22) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor(index), index**2


class Augmented(Squares):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        return index + torch.rand(()), random.random()


class AtOnce(Augmented):
    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, float]]:
        return [self[index] for index in indices]


def batches(rank: int = 0, size: int = 1, batch: int = 4, **options: int) -> Batches:
    return Batches(Squares(), batch, rank, size, torch.device("cpu"), **options)


def numbers(some: Batches, count: int) -> list[list[int]]:
    return [sorted(inputs.tolist()) for inputs, _ in islice(some, count)]


def together(size: int, count: int, **options: int) -> list[list[int]]:
    """The global batches that ``size`` data ranks go through."""
    ranks = [numbers(batches(rank, size, **options), count) for rank in range(size)]
    return [sorted(chain(*parts)) for parts in zip(*ranks, strict=True)]


def test_global_batches_do_not_depend_on_the_ranks() -> None:
    alone = together(1, 12)
    assert together(2, 12) == together(4, 12) == alone
    assert together(2, 12, workers=1) == alone
    epochs = [list(chain(*alone[start : start + 5])) for start in (0, 5)]
    for epoch in epochs:
        # Five whole batches of four are in 22 samples, none of them twice.
        assert len(set(epoch)) == 20
    assert alone[:5] != alone[5:10]
    assert together(1, 12, seed=1) != alone


def test_samples_come_collated() -> None:
    inputs, targets = next(iter(batches()))
    assert torch.equal(inputs**2, targets)


def drawn(rank: int, size: int, *, left_out: int = 0, **options: int) -> dict[float, float]:
    """What augmentation has drawn in two epochs, on a rank whose own generators are elsewhere."""
    torch.manual_seed(rank + 7 * left_out)
    random.seed(rank)
    some = Batches(Augmented(), 4, rank, size, torch.device("cpu"), **options)
    some.load_state_dict({"epoch": 0, "samples": 4 * left_out})
    before = random.getstate()
    found = [pair for batch in islice(some, 10 - left_out) for pair in zip(*batch, strict=True)]
    assert random.getstate() == before
    return {one.item(): other.item() for one, other in found}


def test_what_a_sample_draws_depends_only_on_the_seed_the_epoch_and_the_sample() -> None:
    whole = drawn(0, 1)
    assert len(whole) == 40  # no two draws are equal, also of one sample in two epochs
    assert drawn(0, 2) | drawn(1, 2) == drawn(0, 1, workers=1) == whole
    assert drawn(0, 1, left_out=3).items() <= whole.items()
    assert not drawn(0, 1, seed=1).keys() & whole.keys()


def test_ranks_that_share_samples_which_are_read_at_once_draw_the_same() -> None:
    one, other = (
        [part.tolist() for batch in islice(some, 3) for part in batch]
        for some in (Batches(AtOnce(), 4, 1, 2, torch.device("cpu")) for _ in range(2))
    )
    assert one == other


def test_it_ends_after_its_epochs() -> None:
    assert len(list(batches(epochs=2))) == 10


@pytest.mark.parametrize("done", [3, 5, 7])
def test_it_resumes_with_another_number_of_ranks(done: int) -> None:
    whole = together(1, 12)
    first = batches(1, 2)
    numbers(first, done)
    parts = []
    for rank in range(4):
        rest = batches(rank, 4)
        rest.load_state_dict(first.state_dict())
        parts.append(numbers(rest, 12 - done))
    assert [sorted(chain(*part)) for part in zip(*parts, strict=True)] == whole[done:]


def test_uneven_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="22 samples does not fill one global batch of 32"):
        batches(batch=32)
    with pytest.raises(ValueError, match="3 data ranks cannot share a global batch of 4"):
        batches(size=3)
