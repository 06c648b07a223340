"""The program that watches a machine beside its job, at the job's end."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from dtrain.node import watcher

class Sampler:
    def __init__(self, *arguments): pass
    def start(self): pass
    def stop(self):
        os.kill(os.getpid(), signal.SIGTERM)
        print("sends the last average")

watcher.Sampler = Sampler
with watcher.Watcher(b"/absent", 1, print).watching():
    if sys.argv[1] == "TERM":
        os.kill(os.getpid(), signal.SIGTERM)
print("ends")
"""


@pytest.mark.parametrize("first", ["TERM", "the end of its input"])
def test_a_second_signal_does_not_stop_the_last_average(first: str) -> None:
    command = [sys.executable, "-c", PROGRAM, first]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["sends the last average", "ends"]
