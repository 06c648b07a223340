"""`dtrain.runtime` reaches the workers of a launch on Slurm."""

from __future__ import annotations

import sys

import pytest

from support.cluster import Launcher
from support.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.netns]


def test_workers_import_the_launchers_runtime(slurm: Slurm, launcher: Launcher) -> None:
    program = launcher.folder / "program.py"
    program.write_text("import dtrain.runtime.job as job\nprint(job.__file__)\n")
    file = launcher.folder / "cluster.yaml"
    file.write_text(
        f"cluster: {{slurm: {{}}, nodes: 2, gpus: 2, python: {sys.executable}}}\n"
        f"job: {{framework: none, script: {program}}}\n"
    )
    done = launcher.run(file, env=slurm.environment)
    assert done.code == 0, str(done)
    assert done.stdout.count("/runtime.zip/dtrain/runtime/job.py") == 4, str(done)
