"""A training script, whose first attempt waits once WAIT_AT steps are done, before they are
saved: as ranks do whose peer is gone.

    waiting.py OPTIONS    those of scripts/recipes/train_gpt.py
"""

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from dtrain.runtime import progress


def progress_or_wait(step: int, **more: Any) -> None:
    progress(step, **more)
    if os.environ["DTRAIN_ATTEMPT"] == "1" and step == int(os.environ["WAIT_AT"]):
        print("waits", flush=True)
        while True:
            time.sleep(1)


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "recipes"))
training: Any = importlib.import_module("train_gpt")
training.progress = progress_or_wait
training.main()
