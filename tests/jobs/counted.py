"""Trains nothing: counts steps. Goes on after the last one that its rank saved.

counted.py FOLDER    where each rank saves its step
"""

import os
import sys
from pathlib import Path

from dtrain.runtime import progress
from dtrain.runtime.stopping import catch_sigterm, stop_requested

STEPS = 7


def main() -> None:
    catch_sigterm()
    saved = Path(sys.argv[1]) / f"step-{os.environ['RANK']}"
    step = int(saved.read_text()) if saved.exists() else 0
    if step:
        print(f"resumed after step {step}", flush=True)
    while step < STEPS and not stop_requested():
        step += 1
        progress(step, total=STEPS)
        saved.write_text(str(step))


if __name__ == "__main__":
    main()
