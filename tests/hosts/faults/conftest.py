"""Faults injected while a job writes numbered lines.

After every fault: no byte of the lines is lost or repeated, no process is left, no command hangs,
and another run on the same hosts continues. `scripts/soak` runs the cases repeatedly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cluster import Cluster
from support.cluster import Launcher
from support.faults import Field


@pytest.fixture
def field(hosts: Callable[..., Cluster], launcher: Launcher) -> Iterator[Callable[..., Field]]:
    """Makes ``count`` hosts with a job and a bystander. ``disk`` is the size of their homes."""

    def make(count: int = 3, *, disk: str = "", alive: int = 10) -> Field:
        return Field(hosts(count, home_size=disk), launcher, alive=alive)

    return make
