"""The step program: gathers facts on each machine of an allocation, for `dtrain check`.

srun starts one on each machine and gives each the same order, a line of JSON: a `StepOrder`. The
answer is that of the facts program to ``gather``, with two more facts.
"""

from __future__ import annotations

import json
import os

from dtrain.node.facts.files import expand
from dtrain.node.facts.gather import gather
from dtrain.node.facts.probing import guarded, reason_of
from dtrain.node.facts.programs import leave
from dtrain.node.facts.socket_loop import SocketLoop
from dtrain.node.facts.storage import why_not_writable
from dtrain.node.slurm.wire import StepOutput

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

    from dtrain.node.facts.files import Json
    from dtrain.node.facts.orders import StepOrder
    from dtrain.node.importer import Importer

VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Slurm sets one of them to the GPUs of the step."""


def shared(order: StepOrder) -> Json:
    """Whether this machine sees a file that the login node has just written."""
    path = expand(order["shared"]["path"])
    folder = os.path.dirname(path)
    try:
        with open(path, "rb") as file:
            found = file.read(1024).decode("utf-8", "replace")
    except OSError as error:
        return {"path": folder, "missing": reason_of(error)}
    if found != order["shared"]["content"]:
        return {"path": folder, "missing": "another file is there"}
    return {"path": folder, "missing": "", "not_writable": why_not_writable(folder)}


def granted() -> Json:
    """The GPUs that the step has on this machine."""
    given = [os.environ[name].split(",") for name in VISIBLE if os.environ.get(name)]
    count = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return {"count": int(count) if count.isdigit() else 0, "devices": given[0] if given else []}


def main(stream: BinaryIO, importer: Importer) -> None:
    order: StepOrder = json.loads(stream.readline())
    answer = gather(order, SocketLoop())
    answer["facts"].update(shared=guarded(lambda: shared(order)), granted=guarded(granted))
    StepOutput().send(answer)
    leave()
