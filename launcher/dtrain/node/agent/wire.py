"""The protocol between the launcher and a node's relay.

The launcher writes lines of JSON (commands) to the relay's stdin; the relay writes frames to its
stdout. A frame is a header and a payload:

    kind    u8    MESSAGE or DATA
    stream  u32   which stream the payload belongs to; 0 for messages
    offset  u64   the payload's first byte in that stream; 0 for messages
    length  u32   bytes of payload

A MESSAGE is one JSON object with a ``type``; DATA is raw bytes of a worker's output file.
Before the first frame the relay writes ``PREAMBLE``. Output of a login shell before it is noise,
kept to explain a failed start.

`dtrain.node.agent.commands` has the commands.

Messages, by ``type``:

    hello     protocol, python, hostname, time (the node's clock, seconds since the epoch), pid
    prepared  workdir, folder (both absolute): the launch is ready for ``start``
    refused   what (python, setup, container, workdir, script, port, disk, permission, gone or
              agent), reason, hint: the job cannot start here, and the launch is undone. The last
              message. ``gone`` answers ``attach``: the run has no folder here, so it never
              started, or was removed
    attached  folder, running
    status    state (missing, preparing, ready, running, ended or gone), since (or null), why,
              processes [{role, index, rank, pid, started, ended, code, signal}]: the answer to
              ``look``. A run that is gone has no recorded end: the machine was restarted, or the
              supervisor was killed. The last message
    stream    id, name: the next output file. Its DATA follows
    event     offset, event: one line of the run's events; ``offset`` is where the next begins
    progress  name, offset, said: the known fields of one line that a worker wrote through
              `dtrain.runtime` into the file ``name`` of the run's folder, an event ``progress``,
              ``steps`` or ``tensorboard``; ``offset`` is where the next begins
    sample    said: the host's telemetry of the last second, see `dtrain.node.telemetry`
    average   said: its averages of 10 s, in order of their times
    alive     supervisor, silent, time: the answer to ``ping``: the supervisor's process id (or
              null), for how many seconds it has not answered (0 if it has), and the node's clock
    notice    text: a message for the user
    lost      reason, survivors: the relay has ended the run's processes, because the supervisor
              died, or because some survived the end of the run before this relay attached
    bye       everything has been sent

An event is an object with ``event`` and ``time``:

    started   role, index, rank, pid, numa_node (or null): the process is bound to this NUMA node
    rank      role, index, local_rank, rank, pid (null if it ended too soon), logs: torchrun has
              started a rank. Its streams are ``rank-<rank>.out`` and ``.err``
    exited    role, index, rank, pid, code, signal, stopping, error {message, traceback, time},
              out_of_memory; for torchrun also ranks [{rank, local_rank, pid, exitcode, signal,
              message, traceback, time}] of those that failed
    kernel    lines [[time, line]], gpus: the problems in the kernel's log since the start or the
              last such event, if this user may read it, and the PCI addresses of the host's NVIDIA
              GPUs, in order. Reported after the failure of a process or ``stopping``, before
              ``ended``, like ``collectives``
    stack     role, index, rank, text: the stack of a worker, or of a rank of a torchrun, by py-spy
    collectives  rank, groups [{id, name, ranks, calls}]: the flight recorder dump of a rank: the
              last collectives in each process group, without point-to-point messages. A call has
              seq, op, tensors [[type, sizes]], done, and (only the last call) frames [[function,
              file, line]], innermost first
    ras       text: the status report of NCCL's RAS service, if ``ras`` was true and it answers
    stacks_done  everything that ``stacks`` asked for is reported
    stopping  reason, asked (whether a launcher asked for it)
    ended     survivors [{pid, name}], connected (whether a worker was ever seen connected to
              another worker), and error if the supervisor itself failed

Shipped to nodes, and the launcher imports it too: Python 3.8, standard library only.
"""

from __future__ import annotations

import json
import os
import select
import struct

TYPE_CHECKING = False  # importing typing would cost as much as importing json
if TYPE_CHECKING:
    from typing import Any, Mapping

    Json = dict[str, Any]

VERSION = 1
PREAMBLE = b"\x00dtrain-relay-1\n"
HEADER = struct.Struct(">BIQI")
MESSAGE, DATA = 1, 2
MAX_PAYLOAD = 1 << 20
CHUNK = 512 << 10
"""Bytes of one stream sent before the next one has its turn."""
MAX_TRACEBACK = 16 << 10


class RefusedError(Exception):
    """The job cannot start on this host."""

    def __init__(self, what: str, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.message = {"type": "refused", "what": what, "reason": reason, "hint": hint}


def raw(text: str) -> bytes:
    """The bytes of ``text``, independent of this host's locale."""
    return text.encode("utf-8", "surrogateescape")


def shown(data: bytes) -> str:
    """``data`` as text for a message."""
    return data.decode("utf-8", "backslashreplace")


def encode(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def write_all(fd: int, *parts: bytes) -> None:
    """Write ``parts`` one after the other. Joining them first would copy a large one."""
    views = [memoryview(part) for part in parts]
    while views:
        try:
            written = os.writev(fd, views)
        except BlockingIOError:
            select.select([], [fd], [])
            continue
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views:
            views[0] = views[0][written:]
