"""Runs commands for `dtrain exec`, and ends them with all of their processes when asked, after a
time limit, or when the launcher is gone.

The launcher writes the orders of `dtrain.node.command_orders`. The frames of
`dtrain.node.agent.wire` answer, with the messages of `dtrain.messages.command`. DATA of stream 2n+1
is the stdout of command n, and of stream 2n+2 its stderr.

A process that a command leaves in the background goes on, as after `ssh`, unless it was stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import sys
import threading
import time

from dtrain.node.agent.folder import expand
from dtrain.node.agent.processes import exit_of, reap
from dtrain.node.agent.spawn import cannot_start, spawn, why_not_executed
from dtrain.node.agent.sweep import Sweep, Tag, adopt_orphans, load_prctl
from dtrain.node.agent.wire import DATA, PREAMBLE, encode, frame, raw

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO, Callable

    from dtrain.node.agent.wire import Json
    from dtrain.node.command_orders import CommandRequest, StopCommands
    from dtrain.node.importer import Importer

PIECE = 1 << 16
LINGER = 1.0
"""Seconds that a background process may keep a finished command's output open, without the time in
which a slow launcher keeps us from reading it."""
FAILED = 127


class Untagged(Tag):
    """Finds processes only as descendants: a command gets no variable that marks it as ours."""

    def __init__(self) -> None:
        super().__init__("", "", b"")

    def of(self, pid: int) -> bool | None:
        return None


class NodeCommand:
    def __init__(
        self,
        number: int,
        argv: list[bytes],
        environment: dict[bytes, bytes],
        prctl: Callable[..., int],
    ) -> None:
        self.number = number
        self.status: int | None = None
        self.ended = 0.0
        self.late = False
        self.reported = False
        self.reason = ""
        self.outputs: dict[int, int] = {}
        """The stream of each pipe that is still open."""
        self.offsets = {2 * number + 1: 0, 2 * number + 2: 0}
        self.pid = 0
        pipes: list[tuple[int, int]] = []
        failure = None
        try:
            pipes.extend(os.pipe() for _ in self.offsets)
            self.pid, failure = spawn(
                argv, environment, expand("~"), (pipes[0][1], pipes[1][1]), prctl=prctl
            )
        except OSError as error:
            self.fail(error)
            self.end(0)
        finally:
            for _, writing in pipes:
                os.close(writing)
        for stream, (reading, _) in zip(self.offsets, pipes):
            os.set_blocking(reading, False)
            self.outputs[reading] = stream
        if failure is not None:
            self.reason = why_not_executed(failure, argv[0], environment)

    def fail(self, error: Exception, then: str = "") -> None:
        """The host starts no more processes or threads. ``then``: what follows for the command."""
        self.reason = then + "%(reason)s; %(hint)s" % cannot_start(error).message

    def end(self, status: int) -> None:
        self.status, self.ended = status, time.monotonic()

    @property
    def complete(self) -> bool:
        """Whether the command has ended, and its output too."""
        lingers = self.outputs and time.monotonic() < self.ended + LINGER
        return self.status is not None and not lingers

    def message(self) -> Json:
        code, name = exit_of(self.status or 0)
        if self.reason:
            code, name = FAILED, None
        return {
            "type": "exited",
            "command": self.number,
            "code": code,
            "signal": name,
            "late": self.late,
            "reason": self.reason,
        }


class CommandRelay:
    """One thread polls all pipes. It reads output only when all earlier output is written, so a
    slow launcher slows the commands down instead of filling the memory. A second thread reads
    orders."""

    def __init__(self, request: CommandRequest) -> None:
        prctl = load_prctl()
        self._subreaper = adopt_orphans(prctl)
        self._wake, self._waker = os.pipe()
        for end in (self._wake, self._waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        hidden = {raw(name) for name in request["hidden"]}
        environment = {k: v for k, v in os.environb.items() if k not in hidden}
        self._commands = [
            NodeCommand(number, list(map(raw, argv)), environment, prctl)
            for number, argv in enumerate(request["commands"])
        ]
        self._grace = request["grace"]
        limit = request["limit"]
        self._deadline = None if limit is None else time.monotonic() + limit
        self._orders: queue.SimpleQueue[StopCommands | None] = queue.SimpleQueue()
        """None: the launcher is gone."""
        self._outbox = bytearray(PREAMBLE)
        self._sweep: Sweep | None = None
        self._lost = False

    def serve(self, stream: BinaryIO) -> None:
        os.set_blocking(1, False)
        try:
            threading.Thread(target=self._listen, args=(stream,), daemon=True).start()
        except RuntimeError as error:
            for command in self._commands:
                if not command.reason:
                    command.fail(error, "stopped, because dtrain ")
            self._stop(0.0)
        pause: float | None = 0.0
        while not all(command.reported for command in self._commands):
            self._poll(LINGER if pause is None else pause)
            self._obey()
            pause = self._advance()
        self._send(frame(encode({"type": "bye"})))
        while self._outbox and not self._lost:
            self._poll(LINGER)

    def _advance(self) -> float | None:
        """Report what has ended. Seconds until there is something to do without an event."""
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            for command in self._commands:
                command.late = command.status is None
            self._stop(self._grace)
        pause = self._find_ended()
        # While they are stopped, a command may have left processes that ignore TERM.
        for command in self._commands if self._sweep is None else ():
            if command.complete and not command.reported:
                command.reported = True
                for fd in command.outputs:
                    os.close(fd)
                command.outputs.clear()
                self._send(frame(encode(command.message())))
        if self._deadline is not None:
            pause = min(self._deadline - now, LINGER if pause is None else pause)
        return pause

    def _find_ended(self) -> float | None:
        """Seconds until the sweep's next step; None without a sweep."""
        if self._sweep is None:
            reap(self._take)
            return None
        pause = self._sweep.step()
        if pause is None:
            self._sweep = None
            for command in self._commands:
                if command.status is None:  # it survived KILL
                    command.end(int(signal.SIGKILL))
        return pause

    def _poll(self, seconds: float) -> None:
        """Wait up to ``seconds`` for output, room to write, an order, or the end of a command."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if self._outbox:
            poll.register(1, select.POLLOUT)
        else:
            for command in self._commands:
                for fd in command.outputs:
                    poll.register(fd, select.POLLIN)
        begun, reads = time.monotonic(), not self._outbox
        ready = [fd for fd, _ in poll.poll(max(0.0, seconds) * 1000)]
        if not reads:
            for command in self._commands:
                command.ended += time.monotonic() - begun
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        if 1 in ready:
            self._write()
        for command in self._commands:
            for fd in [fd for fd in command.outputs if fd in ready]:
                self._read(command, fd)

    def _read(self, command: NodeCommand, fd: int) -> None:
        try:
            data = os.read(fd, PIECE)
        except BlockingIOError:
            return
        stream = command.outputs[fd]
        if data:
            self._send(frame(data, DATA, stream, command.offsets[stream]))
            command.offsets[stream] += len(data)
        else:
            os.close(fd)
            del command.outputs[fd]

    def _send(self, parts: tuple[bytes, bytes]) -> None:
        if not self._lost:
            self._outbox += b"".join(parts)

    def _write(self) -> None:
        try:
            del self._outbox[: os.write(1, self._outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._lose()

    def _obey(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                order = self._orders.get_nowait()
                if order is None:
                    self._lose()
                else:
                    self._stop(order["grace"])

    def _lose(self) -> None:
        """The launcher is gone: nobody reads the output, and nobody could stop the commands."""
        self._lost = True
        self._outbox.clear()
        self._stop(self._grace)

    def _stop(self, grace: float) -> None:
        if self._sweep is None:
            self._sweep = Sweep(Untagged(), grace, self._take, self._subreaper)
        else:
            self._sweep.kill_at = min(self._sweep.kill_at, time.monotonic() + grace)

    def _take(self, pid: int, status: int) -> None:
        for command in self._commands:
            # A process that a command has left may get the same number later.
            if command.pid == pid and command.status is None:
                command.end(status)

    def _listen(self, stream: BinaryIO) -> None:
        for line in iter(stream.readline, b""):
            self._orders.put(json.loads(line))
            self._rouse()
        self._orders.put(None)
        self._rouse()

    def _rouse(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._waker, b"\0")


def main(stream: BinaryIO, importer: Importer) -> None:
    line = stream.readline()
    if line:
        CommandRelay(json.loads(line)).serve(stream)
    sys.stdout.flush()
    os._exit(0)
