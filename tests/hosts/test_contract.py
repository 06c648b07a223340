"""The contract of all engines, over SSH."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster import Cluster
from support.cluster import Launcher
from support.contract import Contract, Engine

pytestmark = [pytest.mark.netns, pytest.mark.sshd]


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Cluster]:
    with Cluster(2) as cluster:
        yield cluster


class TestSsh(Contract):
    @pytest.fixture
    def engine(self, two_hosts: Cluster, launcher: Launcher) -> Engine:
        return Engine(launcher, two_hosts.section(slots=2), ("node1", "node2"))
