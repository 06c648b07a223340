"""A training script whose first attempts wait, each after a step, until they are asked to stop.

    interrupted.py MODULE OPTIONS    MODULE is `counted`, or a recipe of scripts/recipes/: train_gpt

WAIT_AT has the step of the first attempt, of the second, and so on: ``3,5``. With WAIT_RANK, only
this rank waits, and the others meet it in the next step.
"""

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from dtrain.runtime import progress
from dtrain.runtime.stopping import stop_requested

WAIT_AT = dict(enumerate(os.environ["WAIT_AT"].split(","), 1))
WAITS = os.environ.get("WAIT_RANK", os.environ["RANK"]) == os.environ["RANK"]


def progress_or_wait(step: int, **more: Any) -> None:
    progress(step, **more)
    if WAITS and WAIT_AT.get(int(os.environ["DTRAIN_ATTEMPT"])) == str(step):
        print("waits", flush=True)
        while not stop_requested():
            time.sleep(0.05)


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "recipes"))
training: Any = importlib.import_module(sys.argv.pop(1))
training.progress = progress_or_wait
training.main()
