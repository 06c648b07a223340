"""The fixtures of tests on Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import Cluster
from support.cluster import Launcher
from support.kubernetes.cluster import NODES, Kubernetes
from support.kubernetes.desk import Desk


@pytest.fixture(scope="session")
def kubernetes_nodes() -> Iterator[Cluster]:
    with Cluster(NODES) as cluster:
        yield cluster


@pytest.fixture
def kubernetes(kubernetes_nodes: Cluster, tmp_path: Path) -> Iterator[Kubernetes]:
    """A fresh cluster on nodes that tests share; they are on when a test begins."""
    folder = tmp_path / "kubernetes"
    folder.mkdir()
    off = [host.name for host in kubernetes_nodes.hosts if not host.pid]
    kubernetes_nodes.boot(*off)
    with Kubernetes(kubernetes_nodes, folder) as kubernetes:
        yield kubernetes


@pytest.fixture
def desk(kubernetes: Kubernetes, launcher: Launcher) -> Desk:
    return Desk(kubernetes, launcher)
