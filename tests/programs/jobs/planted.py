"""What a test plants: the worker that `PLANTED` names meets a bad record, or all wait."""

import json
import os
import time

if "MASTER_ADDR" in os.environ and "JAX_COORDINATOR_ADDRESS" not in os.environ:
    # Gloo's thread may still hold a tensor of the last collective. Freeing one that Python has
    # seen while Python exits aborts the process. So the last collective of every job is one of
    # C++, such as DistributedDataParallel's, and this import keeps the threads from outliving the
    # process group; see scripts/recipes/train_lm.py.
    import torch.distributed.nn  # noqa: F401


def name() -> str:
    """The worker's rank, or its task in a TensorFlow cluster."""
    if "TF_CONFIG" in os.environ:
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        return f"{task['type']} {task['index']}"
    return f"rank {os.environ['RANK']}"


def check(record: int) -> None:
    """Fail or wait at the third record."""
    planted = os.environ.get("PLANTED", "")
    if record == 2 and planted == name():
        raise ValueError(f"record 2 of {name()} is bad")
    if record == 2 and planted == "a wait":
        print("waits at record 2", flush=True)
        time.sleep(600)
