"""What the launcher and a node's relay say to each other, as bytes.

The launcher writes lines of JSON (commands) to the relay's stdin; the relay writes frames to its
stdout. A frame is a header and a payload:

    kind    u8    MESSAGE or DATA
    stream  u32   which stream the payload belongs to; 0 for messages
    offset  u64   the payload's first byte in that stream; 0 for messages
    length  u32   bytes of payload

A MESSAGE is one JSON object with a ``type``; DATA is raw bytes of a worker's output file.
Before the first frame the relay writes ``PREAMBLE``: whatever a login shell printed ahead of it
is noise, kept to explain a failed start.

Commands, by ``op``; the first one says what this relay is for:

    launch   protocol, run, host, run_dir, trust_group, workdir, script, python, setup, environment,
             node_variables, secrets, runtime, processes [{role, index, rank, argv, environment,
             node_variables, service}], ports, grace, on_disconnect, lease: check everything, start
             nothing. ``runtime`` is a zip archive in base64, saved as ``runtime.zip`` in the run's
             folder. Members of ``trust_group``, a Unix group (or null), may own the job's folders
             and write to them. ``node_variables`` {name: {value, kind, place, instead}} are
             variables whose values the node completes, see `dtrain.launchplan.environment`
    attach   protocol, run, host, run_dir, trust_group, offsets, outputs, previous: follow a run
             that was launched before, each stream (``events`` and progress files too) from the
             offset given, or from its beginning; where ``outputs`` is false, events alone.
             ``previous`` is the process id of a relay of this launcher that no longer answers (or
             null): it is killed
    look     protocol, run, host, run_dir, trust_group: report the state of a run that was launched
             before, and end
    start    start the processes of a launch that is prepared
    abort    forget a launch; once it has started, the same as ``kill``
    stop     grace, reason: TERM, ``grace`` seconds, KILL. A later stop may only shorten the wait
    kill     KILL at once
    stacks   abort: tell where every worker is, and every rank of a torchrun. Where py-spy cannot,
             and ``abort`` is true, they get SIGABRT, on which Python writes its stack to stderr, if
             PYTHONFAULTHANDLER is set. Where NCCL's process group listens, its flight recorder is
             asked, too
    ping     a launcher is connected, as every command shows. The relay answers ``alive``, and
             passes it on to the supervisor, which answers the relay with ``pong``

Messages, by ``type``:

    hello     protocol, python, hostname, time (the node's clock, seconds since the epoch), pid
    prepared  workdir, folder (both absolute): a ``start`` would find everything it needs
    refused   what (python, setup, workdir, script, port, disk, permission, gone or agent), reason,
              hint: it cannot, and nothing is left of a launch. The last message. ``gone`` answers
              ``attach``: the run has no folder here, so it never started, or was removed
    attached  folder, running
    status    state (missing, preparing, ready, running, ended or gone), since (or null), why,
              processes [{role, index, rank, pid, started, ended, code, signal}]: the answer to
              ``look``. A run that is gone has not ended as it should: the machine was restarted, or
              the supervisor killed. The last message
    stream    id, name, role, index, rank, fd: the next output file. Its DATA follows
    event     offset, event: one line of the run's events; ``offset`` is where the next begins
    progress  name, offset, said: the known fields of one line that a worker wrote through
              `dtrain.runtime` into the file ``name`` of the run's folder; ``offset`` is where the
              next begins
    alive     supervisor, silent: the answer to ``ping``: the supervisor's process id (or null), and
              for how many seconds it has not answered (0 where it has)
    notice    text: something that a person should know
    lost      reason, survivors: the supervisor died, and what it had started has been ended
    bye       everything has been sent

An event is an object with ``event`` and ``time``:

    started   role, index, rank, pid
    rank      role, index, local_rank, rank, pid (null if it was too quick), logs: torchrun has
              started a rank. Its streams are ``rank-<rank>.out`` and ``.err``
    exited    role, index, rank, pid, code, signal, stopping, error {message, traceback, time},
              out_of_memory; for torchrun also ranks [{rank, local_rank, pid, exitcode, signal,
              message, traceback, time}] of those that failed
    kernel    lines [[time, line]], gpus: what the kernel's log has said of trouble since the start
              or the last such event, where it may be read, and the PCI addresses of the host's
              NVIDIA GPUs, in order. Told after a process's bad end or ``stopping``, before
              ``ended``; so are ``collectives``
    stack     role, index, rank, text: what py-spy says of a worker, or of a rank of a torchrun
    collectives  rank, groups [{id, name, ranks, calls}]: what torch's flight recorder has written
              for a rank: the last collectives in each process group, but no messages from rank to
              rank. A call has seq, op, tensors [[type, sizes]], done, and frames [[function, file,
              line]], innermost first (of the last one alone)
    told      everything that answers ``stacks`` has been told
    stopping  reason
    ended     survivors [{pid, name}], and error if the supervisor itself failed
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dtrain.messages.decode import ProtocolError, excerpt, parse_object

VERSION = 1
PREAMBLE = b"\x00dtrain-relay-1\n"
HEADER = struct.Struct(">BIQI")
MESSAGE, DATA = 1, 2
MAX_PAYLOAD = 1 << 20
MAX_NOISE = 1 << 20
"""Bytes that may come before the preamble."""
KEPT_NOISE = 1 << 16


@dataclass(frozen=True, slots=True)
class Message:
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Data:
    stream: int
    offset: int
    payload: bytes


class FrameDecoder:
    """Turns the relay's stdout, in pieces of any size, into frames."""

    def __init__(self) -> None:
        self._noise: bytes | None = None
        self._searched = 0
        self._buffer = bytearray()

    @property
    def noise(self) -> bytes:
        """The end of what came before the preamble."""
        return bytes(self._buffer[-KEPT_NOISE:]) if self._noise is None else self._noise

    def feed(self, data: bytes) -> Iterator[Message | Data]:
        """Yield the frames that ``data`` completes.

        Raises ProtocolError for output that no relay writes, and for more than `MAX_NOISE` bytes
        before the preamble.
        """
        self._buffer += data
        if self._noise is None and not self._sync():
            return
        start = 0
        try:
            while len(self._buffer) - start >= HEADER.size:
                kind, stream, offset, length = HEADER.unpack_from(self._buffer, start)
                if kind not in (MESSAGE, DATA) or length > MAX_PAYLOAD:
                    raise ProtocolError(f"unreadable frame (kind {kind}, {length} bytes)")
                end = start + HEADER.size + length
                if len(self._buffer) < end:
                    return
                payload = bytes(self._buffer[start + HEADER.size : end])
                start = end
                yield Data(stream, offset, payload) if kind == DATA else _message(payload)
        finally:
            del self._buffer[:start]

    def _sync(self) -> bool:
        at = self._buffer.find(PREAMBLE, self._searched)
        if at < 0 and len(self._buffer) > MAX_NOISE:
            raise ProtocolError(
                f"it printed {MAX_NOISE >> 20} MiB, but not what the agent prints first"
            )
        if at < 0:
            # The preamble may be cut in two.
            self._searched = max(0, len(self._buffer) - len(PREAMBLE) + 1)
            return False
        self._noise = bytes(self._buffer[max(0, at - KEPT_NOISE) : at])
        del self._buffer[: at + len(PREAMBLE)]
        return True


def _message(payload: bytes) -> Message:
    body = parse_object(payload)
    if not isinstance(body.get("type"), str):
        raise ProtocolError(f"a message without a type: {excerpt(payload)}")
    return Message(body)


def encode_command(body: dict[str, Any]) -> bytes:
    """One command for the relay's stdin."""
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"
