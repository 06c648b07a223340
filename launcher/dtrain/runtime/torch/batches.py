"""The samples of each optimizer step, divided among the data ranks."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dtrain.runtime.progress import steps
from dtrain.runtime.torch.weights import seed_of


class Dataset(Protocol):
    """Samples by index; each is a tuple of tensors or numbers."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Drawn:
    """``dataset`` with random numbers (of torch, Python and NumPy) that depend only on ``seed`` and
    the sample, for augmentation and masks.

    The ranks that share a sample, such as those of a pipeline, must not draw different ones: the
    first stage takes the inputs and the last one the targets.
    """

    def __init__(self, dataset: Dataset, seed: str) -> None:
        self._dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        with _drawing(seed_of(self._seed, str(index))):
            return self._dataset[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        several = getattr(self._dataset, "__getitems__", None)
        if several is None:
            return [self[index] for index in indices]
        with _drawing(seed_of(self._seed, str(indices[0]))):
            found: list[Any] = several(indices)
        return found


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """Draws come from ``seed``. The generators that training uses stay as they are."""
    numpy = sys.modules.get("numpy")  # a node may lack it
    states = random.getstate(), numpy and numpy.random.get_state()
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds GPUs, too
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            if numpy is not None:
                numpy.random.set_state(states[1])


class BatchPosition(TypedDict):
    """The position of training in the data."""

    epoch: int
    samples: int
    """Samples of the epoch that all ranks together have used."""


class Batches:
    """An iterator over global batches, endless or for ``epochs``, in a new order each epoch.

    Global batch s of an epoch is the same set of samples in every layout: the s-th group of
    ``global_batch`` samples in an order that depends only on ``seed`` and the epoch. Data rank r of
    R takes every R-th of them, starting at r, like torch's DistributedSampler. Samples that do not
    fill a last global batch are dropped. Tensor and pipeline ranks of one data rank get the same
    samples. It yields the dataset's tuples, collated and on the device. What a sample draws at
    random depends on ``seed``, the epoch and its index, so it is the same in every layout, too.
    A dataset that reads the samples of a rank at once (``__getitems__``) draws for them together,
    so there it depends on the number of data ranks.

    A saved position can be loaded with another number of data ranks or another global batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        global_batch: int,
        data_rank: int,
        data_size: int,
        device: torch.device,
        *,
        seed: int = 0,
        epochs: int | None = None,
        workers: int = 0,
    ) -> None:
        if len(dataset) < global_batch:
            raise ValueError(
                f"a dataset of {len(dataset)} samples does not fill one global batch of"
                f" {global_batch}"
            )
        if global_batch % data_size:
            raise ValueError(
                f"{data_size} data ranks cannot share a global batch of {global_batch} evenly"
            )
        self._dataset = dataset
        self._global_batch = global_batch
        self._data_rank, self._data_size = data_rank, data_size
        self._device = device
        self._seed = seed
        self._epochs = epochs
        self._workers = workers
        self._position = BatchPosition(epoch=0, samples=0)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, counted from 0."""
        return self._position["epoch"]

    def __iter__(self) -> Iterator[list[Tensor]]:
        """Continue after the last iteration or the loaded checkpoint."""
        while self._epochs is None or self.epoch < self._epochs:
            for batch in steps.data(self._loader()):
                # Count the batch before its use: a checkpoint after its step must include it.
                self._position["samples"] += self._global_batch
                yield [tensor.to(self._device, non_blocking=True) for tensor in batch]
            self._position = BatchPosition(epoch=self.epoch + 1, samples=0)

    def indices(self) -> Iterator[list[int]]:
        """The indices of this rank's samples, for each remaining batch of the epoch."""
        generator = torch.Generator("cpu").manual_seed(self._seed + self.epoch)
        order = torch.randperm(len(self._dataset), generator=generator, device="cpu")
        left = order[self._position["samples"] :]
        for start in range(0, len(left) - self._global_batch + 1, self._global_batch):
            batch = left[start : start + self._global_batch]
            yield batch[self._data_rank :: self._data_size].tolist()

    def state_dict(self) -> BatchPosition:
        """The position of the next batch."""
        return BatchPosition(**self._position)

    def load_state_dict(self, state: BatchPosition) -> None:
        """Continue from ``state`` at the next ``iter``."""
        self._position = BatchPosition(**state)

    def _loader(self) -> DataLoader[Any]:
        return DataLoader(
            Drawn(self._dataset, f"{self._seed}/{self.epoch}"),  # type: ignore[arg-type]
            batch_sampler=self.indices(),
            num_workers=self._workers,
            pin_memory=self._device.type == "cuda",
        )
