"""Tests whether all ranks hold the same data: each takes every R-th sample of one list."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from dtrain.runtime.torch.agreement import extremes
from dtrain.runtime.torch.batches import Dataset, Drawn


def refuse_different_data(dataset: Dataset, workers: int) -> None:
    """Raise ValueError, on every rank, if datasets differ in length, or in the first or last
    sample. Random samples are compared only by the dataset's length."""
    length = len(dataset)
    ends = [0, length - 1] if length else []
    digests = [_digest(dataset, ends, workers) for _ in range(2)]
    mine = [length, digests[0], int(digests[0] == digests[1])]
    least, most = extremes(torch.tensor(mine, dtype=torch.long, device="cpu"))
    hint = "give every host the same files, in the same order"
    if least[0] != most[0]:
        raise ValueError(
            f"the ranks hold different data: from {int(least[0])} to {int(most[0])} samples, and"
            f" {length} on rank {dist.get_rank()}; {hint}"
        )
    if least[2] and least[1] != most[1]:
        raise ValueError(
            f"the ranks hold different data: {length} samples each, but not the same first and"
            f" last; {hint}"
        )


def _digest(dataset: Dataset, indices: list[int], workers: int) -> int:
    """A 62-bit digest. Augmentation draws the same random numbers on every rank."""
    digest = hashlib.sha256()
    # Read in a worker process if training uses workers: a file that a dataset opens at its first
    # read must not be open yet when they fork.
    loader: DataLoader[Any] = DataLoader(
        Drawn(dataset, ""),  # type: ignore[arg-type]
        batch_size=None,
        sampler=indices,
        num_workers=min(workers, 1),
        generator=torch.Generator("cpu"),  # not the one that training uses
    )
    for sample in loader:
        for leaf in tree_leaves(sample):
            digest.update(_bytes(leaf))
    return int.from_bytes(digest.digest()[:8], "big") >> 2


def _bytes(leaf: Any) -> bytes:
    if not isinstance(leaf, Tensor):
        return repr(leaf).encode()
    # Without numpy, which a node may lack.
    tensor = leaf.detach().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""
