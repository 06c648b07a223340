"""A fault that a test plants: the worker that `PLANTED` names meets a bad record."""

import json
import os


def name() -> str:
    """The worker's rank, or its task in a TensorFlow cluster."""
    if "TF_CONFIG" in os.environ:
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        return f"{task['type']} {task['index']}"
    return f"rank {os.environ['RANK']}"


def check(record: int) -> None:
    """Fail on the third record."""
    if record == 2 and os.environ.get("PLANTED") == name():
        raise ValueError(f"record 2 of {name()} is bad")
