from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.node import Node, node, oldest_python


@pytest.fixture(scope="session")
def python() -> str:
    """The agent's Python: the oldest one installed that the agent supports."""
    return oldest_python()


@pytest.fixture
def host(python: str) -> Iterator[Node]:
    """A host. Every test ends with a check that no process is left on it."""
    with node(python) as one:
        yield one
