from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import Cluster
from support.cluster import launcher

__all__ = ["launcher"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two hosts whose own names lead to their addresses, as JAX needs it on CPUs."""
    with Cluster(2) as cluster:
        for host in cluster.hosts:
            names = host.folder / "etc" / "hosts"
            names.write_text(names.read_text().replace("127.0.1.1", host.address))
        yield cluster


@pytest.fixture(scope="session")
def python() -> str:
    """The Python of the virtual environment that `scripts/test --stage programs` makes."""
    python = Path(sys.prefix) / "programs" / "bin" / "python"
    assert python.exists(), "scripts/test --stage programs installs what these tests need"
    return str(python)
