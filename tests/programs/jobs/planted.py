"""What a test plants: the worker that `PLANTED` names meets a bad record, or all wait."""

import atexit
import json
import os
import time

if "MASTER_ADDR" in os.environ and "JAX_COORDINATOR_ADDRESS" not in os.environ:
    # Gloo's threads may still hold tensors of the last collective. If they free one while Python
    # exits, the process aborts. This import keeps them from outliving the process group (see
    # scripts/recipes/train_lm.py), and the pause lets them finish where a model keeps the group.
    import torch.distributed.nn  # noqa: F401

    atexit.register(time.sleep, 0.2)


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
