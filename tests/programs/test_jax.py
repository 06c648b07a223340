"""JAX finds the other processes without an argument. It has a virtual environment of its own."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from support.launching import Scene

VERSION = "0.10.2"
PLACE = Path(__file__).parents[2] / ".venv" / "jax"

SCRIPT = """
import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

jax.distributed.initialize()
ranks = multihost_utils.process_allgather(jnp.ones(1) * jax.process_index())
print(f"process {jax.process_index()} of {jax.process_count()}: {int(ranks.sum())}", flush=True)
"""


@pytest.fixture(scope="session")
def python_with_jax() -> str:
    python = PLACE / "bin" / "python"
    done = PLACE / f"jax-{VERSION}"
    with PLACE.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", PLACE], check=True)
            install = [python, "-m", "pip", "install", "-q", f"jax=={VERSION}"]
            subprocess.run(install, check=True)
            done.touch()
    return str(python)


@pytest.mark.jax
def test_initialize_needs_no_arguments(scene: Scene, python_with_jax: str) -> None:
    file = scene.cluster_file(
        scene.script(SCRIPT),
        python=python_with_jax,
        framework="jax",
        env={"JAX_PLATFORMS": "cpu"},
    )
    done = scene.run(file)
    assert done.code == 0, str(done)
    for rank in range(4):
        assert f"process {rank} of 4: 6" in done.lines(f"node{rank // 2}", rank), str(done)
    assert "separate trainings" not in done.stderr
