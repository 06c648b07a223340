"""The program that watches a machine of a Slurm job, at the job's end."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import io, os, signal, sys
from dtrain.node.slurm import watcher

class Sampler:
    def __init__(self, *arguments): pass
    def start(self): pass
    def stop(self):
        os.kill(os.getpid(), signal.SIGTERM)
        print("sends the last average")

class Orders(io.BytesIO):
    def readline(self):
        if sys.argv[1] == "TERM":
            os.kill(os.getpid(), signal.SIGTERM)
        return b""

watcher.Sampler = Sampler
watcher.Watcher({"folder": "/absent", "world_size": 1}).serve(Orders())
print("ends")
"""


@pytest.mark.parametrize("first", ["TERM", "the end of its input"])
def test_a_second_signal_does_not_stop_the_last_average(first: str) -> None:
    command = [sys.executable, "-c", PROGRAM, first]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["sends the last average", "ends"]
