"""Asks the facts program on one host."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from dtrain.diagnostics import AnswerError, ConnectError, NodeError, PrepareError
from dtrain.launchplan.plan import HostPlan
from dtrain.messages import facts
from dtrain.messages.decode import ProtocolError, decode, parse_object
from dtrain.node.facts.orders import Order
from dtrain.node.facts.wire import PREAMBLE, RELEASE
from dtrain.transport import node_program
from dtrain.transport.contract import Connection, RemoteProcess
from dtrain.transport.incoming import Incoming

ATTEMPTED = "checking the host"
CLOCK_READINGS = 5
END_SECONDS = 2.0

_Answer = TypeVar("_Answer")


class Conversation:
    """A connection to the facts program on one host. Only one thread uses it at a time, but any
    thread may end and close it. The connection itself stays open."""

    def __init__(self, part: HostPlan, connection: Connection, run: str = "") -> None:
        """With ``run``, the name of a launch on the host, `release` is possible."""
        self.part = part
        self._connection = connection
        self._run = run
        self._lock = threading.Lock()
        self._process: RemoteProcess | None = None
        self._incoming: Incoming
        self._closed = False
        self.begun = False
        """Whether the program has started. Login scripts run before it."""
        self._waits = True
        """Whether an answer is missing."""
        self._writes = False
        """Whether an order is being written, which the host may block."""

    def begin(self, pythons: Sequence[str]) -> None:
        """Start the program with the first of ``pythons`` that runs. Raises NodeError."""
        for python in pythons:
            try:
                self._start(python)
                self.begun = True
                return
            except PrepareError:
                if python == pythons[-1]:
                    raise

    def ask(self, order: Order, read: Callable[[dict[str, Any]], _Answer]) -> _Answer:
        """Send one request and return the answer, decoded by ``read`` from a JSON object.

        Raises NodeError, also if ``read`` raises ProtocolError.
        """
        assert self._process is not None  # noqa: S101 (types)
        self._waits = True
        self._writes = True
        self._process.write(json.dumps(order).encode() + b"\n")
        self._writes = False
        with self._answers():
            answer = read(parse_object(self._incoming.until(b"\n", facts.MAX_ANSWER)))
        self._waits = False
        return answer

    def clock(self, enough: float) -> tuple[float, float]:
        """Seconds by which the host's clock is ahead of this machine's, and the round-trip time:
        the fastest of several, or the first that takes at most ``enough`` seconds."""
        best = (0.0, float("inf"))
        for _ in range(CLOCK_READINGS):
            sent, begun = time.time(), time.monotonic()
            theirs = self.ask({"op": "clock"}, partial(decode, facts.Clock, where="clock"))["time"]
            took = time.monotonic() - begun
            if took < best[1]:
                best = (theirs - sent - took / 2, took)
            if took <= enough:
                break
        return best

    def release(self) -> RemoteProcess | None:
        """End the check. Returns the process, which is the relay from now on, or None if the host
        has not answered everything."""
        with self._lock:
            process = None if self._waits or self._closed else self._process
            if process is not None:
                self._process, self._closed = None, True
        if process is not None:
            with suppress(NodeError):
                process.write(RELEASE)
        return process

    def end(self) -> None:
        """Request the end of the program, and start no other; `close` waits for it."""
        with self._lock:
            self._closed, process = True, self._process
        if process is not None and self._writes:
            process.close()
        elif process is not None:
            with suppress(NodeError):
                process.close_stdin()

    def close(self, within: float = END_SECONDS) -> None:
        """End the program and wait for it. Safe to call twice."""
        self.end()
        if self._process is not None:
            # The program's listening ports stay busy until it exits.
            with suppress(NodeError, TimeoutError):
                self._process.wait(within)
            self._process.close()

    def _start(self, python: str, *, kept: bool = True) -> None:
        process = node_program.start(
            self._connection,
            "launch" if self._run else "facts",
            python,
            label=self._run or "check",
            kept=kept,
        )
        self._incoming = Incoming(process)
        with self._lock:
            self._process, closed = process, self._closed
        if closed:
            process.close()
            raise ConnectError(self.part.host.name, ATTEMPTED, "it answered too late")
        try:
            with self._answers():
                self._incoming.preamble(PREAMBLE)
        except _EndedError:
            output = self._incoming.pieces.end
            if kept and node_program.is_missing(process, output):
                process.close()
                self._start(python, kept=False)
                return
            host = self.part.host.name
            failure = node_program.failure(host, ATTEMPTED, python, process, output)
            process.close()
            raise failure from None

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Turns errors in an answer into a NodeError."""
        try:
            yield
        except EOFError:
            raise _EndedError(self.part.host.name, ATTEMPTED, "the connection was closed") from None
        except ProtocolError as error:
            raise AnswerError(self.part.host.name, ATTEMPTED, error) from None


class _EndedError(ConnectError):
    """The program on the host has ended."""
