"""The host's cores that a rank can compute with."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Set
from fractions import Fraction

import torch.distributed as dist

Cores = tuple[str, Set[int]]
"""A host, and those of its cores that a rank may use."""


def own_cores() -> int:
    """Return this rank's share of the host's cores. Call it on all ranks: only together they know
    if a launcher has bound each to cores of its own, to those of a NUMA node, or to none."""
    mine = os.uname().nodename, os.sched_getaffinity(0)
    every: list[Cores] = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return share(mine, every)


def share(mine: Cores, every: Iterable[Cores]) -> int:
    """Return the cores of ``mine``, divided among the ranks that may use the same ones."""
    host, cores = mine
    users = Counter(core for other, theirs in every if other == host for core in theirs)
    # Threads of all ranks together must not be more than the cores: they would take turns.
    return max(1, int(sum(Fraction(1, users[core]) for core in cores)))
