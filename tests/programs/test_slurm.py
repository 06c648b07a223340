"""A job file of the page `examples` moves to Slurm: only `cluster` differs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml
from tests.programs.test_examples import JOBS, OFFLINE, PROGRAMS, example

from support.cluster import Launcher
from support.slurm import Slurm, one_slurm, slurm

__all__ = ["one_slurm", "slurm"]
pytestmark = [pytest.mark.programs, pytest.mark.netns]


@pytest.fixture(autouse=True)
def names_lead_to_addresses(slurm: Slurm) -> Iterator[None]:
    """As JAX needs it on CPUs."""
    files = [host.folder / "etc" / "hosts" for host in slurm.nodes]
    before = [file.read_text() for file in files]
    for host, file, text in zip(slurm.nodes, files, before, strict=True):
        file.write_text(text.replace("127.0.1.1", host.address))
    yield
    for file, text in zip(files, before, strict=True):
        file.write_text(text)


@pytest.mark.parametrize("planted", ["", "rank 1"])
def test_jax_trains_or_names_the_process_that_failed(
    slurm: Slurm, launcher: Launcher, python: str, planted: str
) -> None:
    program = PROGRAMS["jax"]
    job = yaml.safe_load(example(program))["job"]
    job["env"] = {**OFFLINE, **program.env, "PLANTED": planted}
    job["sync"] = {"source": str(JOBS)}
    run_dir, workdir = str(slurm.shared / "runs"), str(slurm.shared / "jax")
    cluster = {"slurm": {}, "nodes": 2, "slots": 1, "gpus": 0, "python": python, "run_dir": run_dir}
    file = launcher.folder / "job.yaml"
    file.write_text(yaml.safe_dump({"cluster": cluster, "job": {**job, "workdir": workdir}}))
    options = ["--no-check"] if planted else []
    done = launcher.run(file, *options, env=slurm.environment)
    if planted:
        assert done.code == 1, str(done)
        report = done.stderr.partition("\nerror: ")[2]
        assert report.startswith(f"rank 1 on {slurm.nodes[1].name} "), str(done)
        assert f"    ValueError: record 2 of {planted} is bad\n" in report, str(done)
    else:
        assert done.code == 0, str(done)
        assert done.stdout.count("trained 4 steps on 2 ranks") == 2, str(done)
