"""The Slurm of the tests behaves as they assume."""

from __future__ import annotations

import pytest

from support.slurm import GPUS, Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.netns]


def test_each_task_sees_its_node_and_its_gpus(slurm: Slurm) -> None:
    output = slurm.shared / "tasks.txt"
    script = "#!/bin/sh\nsrun sh -c 'echo $(hostname) $SLURM_PROCID $CUDA_VISIBLE_DEVICES'\n"
    options = ["--nodes=2", "--ntasks-per-node=2", f"--gpus-per-node={GPUS}", f"--output={output}"]
    job = slurm.sbatch(script, *options)
    assert slurm.job(job)["ExitCode"] == "0:0"
    first, second = (host.name for host in slurm.nodes[:2])
    expected = [f"{first} 0 0,1", f"{first} 1 0,1", f"{second} 2 0,1", f"{second} 3 0,1"]
    assert sorted(output.read_text().splitlines()) == expected


def test_a_login_node_submits_jobs(slurm: Slurm) -> None:
    assert "gpu" in slurm.run(*slurm.cluster.ssh(slurm.login), "sinfo -h -o %P")
