from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.limits import until
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


@pytest.fixture
def tasks() -> Iterator[Path]:
    """A cgroup that limits processes and threads."""
    group = Path("/sys/fs/cgroup/pids", f"dtrain-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup: {error}")
    yield group
    until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()
