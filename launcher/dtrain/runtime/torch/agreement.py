"""What one rank finds wrong, all of them raise: none waits for another that has given up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def agreed() -> Iterator[None]:
    """A step that all ranks take, without communication in it. Raises ValueError with the first
    failing rank's reason on those where it went well."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised again, once the others know
        failed = error
    mine = None if failed is None else f"{failed} (rank {dist.get_rank()})"
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, mine)
    if failed is not None:
        raise failed
    for reason in reasons:
        if reason is not None:
            raise ValueError(reason)
