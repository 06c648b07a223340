"""Count steps, each with a checkpoint, until the file STOP exists. Resumes earlier runs.

    resume.py FOLDER

FOLDER is shared by all hosts. Each attempt has its own files there, because a host that cannot be
reached may still run an earlier attempt. A rank that waits for its peers (a barrier, as a
collective would) waits forever if one of them is dead.
"""

import os
import sys
import time
from pathlib import Path

from dtrain.runtime import progress

folder = Path(sys.argv[1])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = os.environ["DTRAIN_ATTEMPT"]
mine = folder / f"step-{rank}-{attempt}"
step = max((int(file.read_text()) for file in folder.glob(f"step-{rank}-*")), default=0)
print(f"attempt {attempt} on {os.environ['DTRAIN_HOST']} from step {step}", flush=True)


def others() -> int:
    return min(int((folder / f"step-{r}-{attempt}").read_text()) for r in range(world))


while not (folder / "stop").exists():
    step += 1
    draft = folder / f"draft-{rank}-{attempt}"
    draft.write_text(str(step))
    draft.replace(mine)
    progress(step)
    print("line", step, flush=True)
    while not (folder / "stop").exists():
        try:
            if others() >= step - 1:
                break
        except FileNotFoundError:
            pass
        time.sleep(0.01)
    time.sleep(0.02)
print("trained", flush=True)
