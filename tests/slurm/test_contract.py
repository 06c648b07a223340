"""The contract of all engines, on Slurm."""

from __future__ import annotations

import sys

import pytest

from support.cluster import Launcher
from support.contract import Contract, Engine
from support.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.netns, pytest.mark.sshd]


class TestSlurm(Contract):
    @pytest.fixture
    def engine(self, slurm: Slurm, launcher: Launcher) -> Engine:
        section = {"slurm": {}, "nodes": 2, "gpus": 2, "python": sys.executable}
        first, second, *_ = (host.name for host in slurm.nodes)
        return Engine(launcher, section, (first, second), slurm.environment)
