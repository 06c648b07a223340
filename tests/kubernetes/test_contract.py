"""The contract of all engines, on Kubernetes."""

from __future__ import annotations

import pytest

from support.cluster import Launcher
from support.contract import Contract, Engine, shared_folder
from support.kubernetes.cluster import Kubernetes

pytestmark = [pytest.mark.kubernetes, pytest.mark.netns]


class TestKubernetes(Contract):
    @pytest.fixture
    def engine(self, kubernetes: Kubernetes, launcher: Launcher) -> Engine:
        shared = shared_folder(launcher)
        pods = {"image": "test:1", "host_paths": [f"{shared}:{shared}"]}
        section = {"kubernetes": pods, "nodes": 2, "gpus": 0, "slots": 2}
        return Engine(
            launcher,
            section,
            ("node0", "node1"),
            kubernetes.environment,
            # The API server of the tests is slow.
            megabytes=1,
            streams_of_ranks=False,
        )
