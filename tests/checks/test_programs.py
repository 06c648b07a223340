"""Processes that a host's check starts do not outlive it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.limits import HANG, until

# Exits at the worst moment: a program has started and is not recorded yet.
LEAVES = """
import subprocess, sys, threading
from dtrain.node.facts import programs

class Slow(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        print(self.pid, flush=True)
        threading.Thread(target=programs.leave).start()
        threading.Event().wait(0.5)

subprocess.Popen = Slow
programs.run(["sleep", "600"], environment=None)
"""


def test_a_program_that_has_just_started_is_killed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=HANG
    )
    assert (done.returncode, done.stderr) == (0, "")
    stat = Path(f"/proc/{int(done.stdout)}/stat")

    def ended() -> bool:
        try:
            return stat.read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    until(ended)
