"""What all ranks find out together: the error of one rank, and how far their values differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor


@contextmanager
def agreed() -> Iterator[None]:
    """Wraps a step that all ranks take without communication. If it fails on any rank, the ranks
    where it succeeded raise ValueError with the first failing rank's reason. Otherwise they would
    wait for the failed one."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, after the exchange
        failed = error
    mine = None if failed is None else f"{failed} (rank {dist.get_rank()})"
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, mine)
    if failed is not None:
        raise failed
    for reason in reasons:
        if reason is not None:
            raise ValueError(reason)


def extremes(mine: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest value on any rank, of each element of ``mine``."""
    least, most = mine.clone(), mine.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return least, most
