from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.node import Node, node, oldest_python


@pytest.fixture(scope="session")
def python() -> str:
    """What the agent runs under: the oldest Python that it supports, where there is one."""
    return oldest_python()


@pytest.fixture
def host(python: str) -> Iterator[Node]:
    """A host that nothing is left on: every test ends with a look at the processes."""
    with node(python) as one:
        yield one
