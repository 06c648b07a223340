"""The watcher of one machine of a Slurm job.

It runs in a step of its own beside the job, one on each machine. srun gives each the same orders,
lines of JSON:

    folder, world_size        the first: the folder of the attempt, which has one for each machine
    host, abort, ras          the machine ``host`` reports the stacks of its workers, as in the
                              order ``stacks`` of an agent

It writes the messages of `dtrain.node.watcher`, each with its ``host``. It ends with its input, or
with TERM at the end of the job.
"""

from __future__ import annotations

import json
import os

from dtrain.node.agent.folder import expand
from dtrain.node.agent.wire import raw
from dtrain.node.slurm.wire import StepOutput
from dtrain.node.watcher import Watcher

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO

    from dtrain.node.importer import Importer


def main(stream: BinaryIO, importer: Importer) -> None:
    host = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    output = StepOutput()

    def report(kind: str, **body: Any) -> None:
        output.send({"type": kind, "host": host, **body})

    first = json.loads(stream.readline())
    folder = os.path.join(expand(first["folder"]), raw(host))
    watcher = Watcher(folder, first["world_size"], report)
    with watcher.watching():
        for line in iter(stream.readline, b""):
            order = json.loads(line)
            if order["host"] == host:
                watcher.diagnose(abort=order["abort"], ras=order["ras"])
    os._exit(0)
