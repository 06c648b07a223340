from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain.spec.model import Host
from dtrain.transport.local import LocalTransport
from support.synced import Folders


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Folders]:
    source = tmp_path / "source"
    source.mkdir()
    transport = LocalTransport()
    connection = transport.connect(Host(name="gpu01", address="gpu01", transport="local"))
    yield Folders(source, tmp_path / "node" / "gpt", connection)
    connection.close()
    transport.close()
