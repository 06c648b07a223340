"""Count steps, each with a checkpoint, until the file STOP exists. Resumes earlier runs.

    resume.py FOLDER

FOLDER is shared by all hosts. A rank that waits for its peers (a barrier, as a collective would)
waits forever if one of them is dead.
"""

import os
import sys
import time
from pathlib import Path

from dtrain.runtime import progress

folder = Path(sys.argv[1])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = os.environ["DTRAIN_ATTEMPT"]
mine = folder / f"step-{rank}"
step = int(mine.read_text()) if mine.exists() else 0
print(f"attempt {attempt} on {os.environ['DTRAIN_HOST']} from step {step}", flush=True)


def others() -> int:
    return min(int((folder / f"step-{r}").read_text() or 0) for r in range(world))


while not (folder / "stop").exists():
    step += 1
    draft = mine.with_suffix(".new")
    draft.write_text(str(step))
    draft.replace(mine)
    progress(step)
    print("line", step, flush=True)
    while not (folder / "stop").exists():
        try:
            if others() >= step - 1:
                break
        except (OSError, ValueError):
            pass
        time.sleep(0.01)
    time.sleep(0.02)
print("trained", flush=True)
