"""The samples of each optimizer step, shared out over the data ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor
from torch.utils.data import DataLoader


class Dataset(Protocol):
    """Samples by number; each is a tuple of tensors or numbers."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Position(TypedDict):
    """Where in the data a training is."""

    epoch: int
    samples: int
    """Samples of the epoch that all ranks together have been through."""


class Batches:
    """An endless (or ``epochs`` long) iterator over global batches, in a new order each epoch.

    Global batch number s of an epoch is the same set of samples whatever the layout: of an order
    that ``seed`` and the epoch fix, the s-th run of ``global_batch`` samples. Data rank r of R
    takes every R-th of them, from r on, as torch's DistributedSampler does; the samples that do
    not fill a last global batch are left out. Tensor and pipeline ranks of one data rank get the
    same samples. What is given are the dataset's tuples, collated and on the device.

    A saved position can be loaded with another number of data ranks, or another global batch.
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
        self._position = Position(epoch=0, samples=0)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch is of, from 0."""
        return self._position["epoch"]

    def __iter__(self) -> Iterator[list[Tensor]]:
        """Go on from where the last iteration, or a loaded checkpoint, left off."""
        while self._epochs is None or self.epoch < self._epochs:
            for batch in self._loader():
                # Before the batch is used: a checkpoint after its step says that it has been.
                self._position["samples"] += self._global_batch
                yield [self._moved(tensor) for tensor in batch]
            self._position = Position(epoch=self.epoch + 1, samples=0)

    def indices(self) -> Iterator[list[int]]:
        """The numbers of this rank's samples, for each batch that is left in the epoch."""
        generator = torch.Generator("cpu").manual_seed(self._seed + self.epoch)
        order = torch.randperm(len(self._dataset), generator=generator, device="cpu")
        left = order[self._position["samples"] :]
        for start in range(0, len(left) - self._global_batch + 1, self._global_batch):
            batch = left[start : start + self._global_batch]
            yield batch[self._data_rank :: self._data_size].tolist()

    def state_dict(self) -> Position:
        """Where the next batch is."""
        return Position(**self._position)

    def load_state_dict(self, state: Position) -> None:
        """Go on from there, at the next ``iter``."""
        self._position = Position(**state)

    def _loader(self) -> DataLoader[Any]:
        return DataLoader(
            self._dataset,  # type: ignore[arg-type]
            batch_sampler=self.indices(),
            num_workers=self._workers,
            pin_memory=self._device.type == "cuda",
        )

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)
