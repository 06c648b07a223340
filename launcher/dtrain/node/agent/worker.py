"""One process of a run: a worker, a service or a torchrun."""

from __future__ import annotations

import os
import time

from dtrain.launchplan.names import process_name
from dtrain.node.agent.processes import environment_of, look
from dtrain.node.agent.spawn import missing, spawn, why_not_executed
from dtrain.node.agent.sweep import members
from dtrain.node.agent.wire import raw

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from dtrain.node.agent.commands import ProcessRequest
    from dtrain.node.agent.open_files import Limits
    from dtrain.node.agent.processes import Proc
    from dtrain.node.agent.ranks import Ranks
    from dtrain.node.agent.sweep import Tag
    from dtrain.node.agent.wire import Json
    from dtrain.node.numa import Binding


class Worker:
    def __init__(self, body: ProcessRequest) -> None:
        self.role: str = body["role"]
        self.index: int = body["index"]
        self.rank: int | None = body["rank"]
        self.argv: list[bytes] = []
        self.environment: dict[bytes, bytes] = {}
        self.contained = b""  # its error file, if it runs in a container
        self.outputs = -1, -1  # descriptors of its stdout and stderr files
        self.pid = 0
        self.error: Json | None = None  # why it could not be executed
        self.ranks: Ranks | None = None
        self.binding: Binding | None = None

    @property
    def name(self) -> bytes:
        return raw(process_name(self.role, self.index))

    def identity(self) -> Json:
        """The fields that identify it in events."""
        return {"role": self.role, "index": self.index, "rank": self.rank}

    def process(self, tag: Tag) -> Proc | None:
        """The process itself. In a container, the process that we have started may be the client
        of a container engine."""
        if not self.contained:
            return look(self.pid)
        name = b"TORCHELASTIC_ERROR_FILE"
        found = [
            proc
            for proc in members(tag, 0)
            if environment_of(proc.pid, having=name).get(name) == self.contained
        ]
        # Its children have the same environment.
        return min(found, key=lambda proc: proc.start, default=None)

    def start(self, workdir: bytes, prctl: Callable[..., int], open_files: Limits) -> None:
        """Start the process and close its outputs here. ``error`` is set if that fails."""
        self.pid, failure = spawn(
            self.argv,
            self.environment,
            workdir,
            self.outputs,
            prctl=prctl,
            binding=self.binding,
            open_files=open_files,
        )
        if failure is not None:
            self.error = {
                "message": why_not_executed(failure, self.argv[0], self.environment),
                "traceback": "",
                "time": time.time(),
                "code": 127 if missing(failure) else 126,
            }
        for fd in self.outputs:
            os.close(fd)
