from __future__ import annotations

import signal
import subprocess
import sys

from support.limits import HANG

TRAIN = """
import signal
from dtrain.runtime import catch_sigterm, stop_requested
catch_sigterm()
print("training", stop_requested(), flush=True)
while not stop_requested():
    signal.pause()
print("saved", flush=True)
"""


def test_sigterm_only_sets_a_flag() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAIN],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "training False\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=HANG)[0] == "saved\n"
    assert process.returncode == 0
