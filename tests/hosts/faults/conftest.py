"""Faults that are injected while a job writes numbered lines.

Whatever it is: no byte of the lines is lost or doubled, nothing stays behind, no command hangs,
and another run on the same hosts goes on. Each case once; `scripts/soak` runs them again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cluster import Cluster
from support.cluster import Launcher
from support.faults import Field


@pytest.fixture
def field(hosts: Callable[..., Cluster], launcher: Launcher) -> Iterator[Callable[..., Field]]:
    """Makes ``count`` hosts with a job and a bystander. ``disk`` is how large their homes are."""

    def make(count: int = 3, *, disk: str = "", alive: int = 2) -> Field:
        return Field(hosts(count, home_size=disk), launcher, alive=alive)

    return make
