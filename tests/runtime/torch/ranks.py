"""Start the ranks of a torch job like torchrun, each in a separate process with torch imported."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from support.limits import HANG
from support.ports import free_port
from support.warm import TORCH, Process, server

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CRASHES = {-signal.SIGABRT, -signal.SIGSEGV}


def start(world: int, script: Path, *arguments: object, **variables: str) -> list[Process]:
    """Each rank has one pipe for standard output and error."""
    sources = [ROOT / "launcher", ROOT / "scripts" / "recipes", HERE]
    shared = {
        **{key: value for key, value in os.environ.items() if not key.startswith("DTRAIN_")},
        "PYTHONPATH": os.pathsep.join(map(str, sources)),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **variables,
    }
    imported = server(*TORCH)
    return [
        imported.start(
            script, *arguments, environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(world)
    ]


def finish(ranks: Sequence[Process], timeout: float = HANG) -> list[str]:
    """What each rank printed. A rank that hangs is killed, with all others."""
    try:
        return [rank.communicate(timeout=timeout)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def run(world: int, script: Path, *arguments: object, **variables: str) -> list[str]:
    """The output of each rank of a successful job.

    A job with a crashed rank runs once more: in one of some hundred jobs, torch's gloo corrupts the
    heap ("malloc(): unaligned tcache chunk detected"). What is tested is Python and cannot.
    """
    for _ in range(2):
        ranks = start(world, script, *arguments, **variables)
        said = finish(ranks)
        codes = [rank.returncode for rank in ranks]
        if CRASHES.isdisjoint(codes):
            break
    assert codes == [0] * world, f"exit codes {codes}\n" + "\n".join(
        f"--- rank {rank}\n{text[-3000:]}" for rank, text in enumerate(said)
    )
    return said
