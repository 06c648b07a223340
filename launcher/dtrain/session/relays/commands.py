"""Runs a command on many hosts at once, for `dtrain exec`. Independent of runs.

One thread for each connection reads. All output goes through one queue with room for a few pieces
to the caller's thread, so a slow terminal slows the commands down instead of filling the memory.
Another thread sends stop requests, even while the caller's thread is blocked in a write.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import field
from typing import TypeAlias

from dtrain.diagnostics import ConnectError, ExitCode, NodeError
from dtrain.messages import command as messages
from dtrain.messages.agent import Bye
from dtrain.messages.decode import ProtocolError, answer_of
from dtrain.node import protocol
from dtrain.node.command_orders import CommandRequest, StopCommands
from dtrain.node.waiting import next_item
from dtrain.records import dataclass
from dtrain.session.relays.relay import RelayChannel
from dtrain.session.stopping.control import Control, Force
from dtrain.spec.model import Host
from dtrain.transport import node_program
from dtrain.transport.contract import Connection, Transport

GRACE = 5.0
"""Seconds between TERM and KILL."""
LATE = 30.0
"""Seconds after the time limit in which a host must report the end of its command."""
WAITING = 30.0
"""Seconds between two looks for hosts that do not answer, until the user hears of some."""
QUEUED = 64
"""Pieces of output that wait for the caller's thread."""
POLL = 0.1
ATTEMPTED = "running a command"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a command runs: on ``host``, by a program on ``via``, which may be the same."""

    host: str
    via: Host
    python: str
    """Runs dtrain's program on ``via``."""
    prefix: tuple[str, ...] = ()
    """Words in front of the command."""
    spare: bool = False
    """Whether the job does not use the host now."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended on one host."""

    host: str
    code: int | None = None
    """Exit status; None after a signal, and if it is not known."""
    signal: str | None = None
    late: bool = False
    """Whether it was ended because of the time limit."""
    reason: str = ""
    """Why the command could not be executed."""
    error: NodeError | None = None
    """Why the host could not run it, or was lost."""

    @property
    def exit_code(self) -> ExitCode:
        if self.error is not None:
            return ExitCode.NODE_FAILED
        return ExitCode.OK if self.code == 0 and not self.late else ExitCode.JOB_FAILED


class Receiver:
    """Gets what happens, and ignores what a subclass has no method for. All calls come from the
    thread of `Commands.run`."""

    def started(self, hosts: Sequence[str]) -> None: ...

    def output(self, host: str, stream: str, data: bytes) -> None:
        """``stream`` is ``stdout`` or ``stderr``."""

    def ended(self, outcome: Outcome) -> None: ...

    def waiting(self, hosts: Sequence[str]) -> None:
        """These hosts have accepted the login and not answered for a long time. Called once."""

    def idle(self) -> None:
        """Nothing has happened for a moment."""


@dataclass(slots=True)
class _Group:
    """The commands that run over one connection."""

    targets: list[Target]
    connection: Connection | None = None
    relay: RelayChannel | None = None
    """Set once the commands are requested."""
    reported: set[int] = field(default_factory=set)
    """Commands whose end the reader has seen."""
    ended: set[int] = field(default_factory=set)
    """Commands whose outcome the caller has."""
    given_up: bool = False

    @property
    def begun(self) -> bool:
        return self.relay is not None and self.relay.has_begun

    @property
    def silent(self) -> bool:
        """Whether the host has accepted the login, and its program says nothing."""
        return self.connection is not None and not (self.begun or self.over)

    @property
    def over(self) -> bool:
        return len(self.ended) == len(self.targets)


_Event: TypeAlias = tuple[_Group, int, tuple[str, bytes] | Outcome | Exception]


class Commands:
    """One command on several hosts. A `Control` stops it: TERM first, a second request kills, and
    a third gives up on hosts that do not answer."""

    def __init__(
        self,
        targets: Sequence[Target],
        argv: Sequence[str],
        transport: Transport,
        *,
        hidden: Collection[str] = (),
        limit: float | None = None,
    ) -> None:
        """``hidden``: variables that the command must not inherit. ``limit``: seconds after which
        it is stopped."""
        self._argv = [*argv]
        self._hidden = [*hidden]
        self._limit = limit
        self._transport = transport
        groups: dict[int, _Group] = {}
        for target in targets:
            groups.setdefault(id(target.via), _Group([])).targets.append(target)
        self._groups = [*groups.values()]
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._room = threading.Semaphore(QUEUED)
        """For output alone: who gives up on a host must not wait for the terminal."""
        self._over = threading.Event()

    def run(self, receiver: Receiver, control: Control) -> list[Outcome]:
        """Run the command and wait until it has ended everywhere. The order of the outcomes is
        that of the targets."""
        outcomes: dict[str, Outcome] = {}
        receiver.started([target.host for group in self._groups for target in group.targets])
        for group in self._groups:
            threading.Thread(target=self._follow, args=(group,), daemon=True).start()
        threading.Thread(target=self._watch, args=(control,), daemon=True).start()
        patience = time.monotonic() + WAITING
        try:
            while not all(group.over for group in self._groups):
                if (now := time.monotonic()) > patience:
                    late = [one.targets[0].via.name for one in self._groups if one.silent]
                    patience = math.inf if late else now + WAITING
                    if late:
                        receiver.waiting(late)
                try:
                    group, number, what = next_item(self._events, POLL)
                except queue.Empty:
                    receiver.idle()
                    continue
                if isinstance(what, tuple):
                    self._room.release()
                if number in group.ended:
                    continue  # given up
                target = group.targets[number]
                if isinstance(what, Outcome):
                    group.ended.add(number)
                    outcomes[target.host] = what
                    receiver.ended(what)
                elif isinstance(what, Exception):
                    raise what  # a fault in a reading thread
                else:
                    receiver.output(target.host, *what)
        finally:
            self._over.set()
        return [outcomes[target.host] for group in self._groups for target in group.targets]

    def _watch(self, control: Control) -> None:
        """Send stop requests, and give up on hosts that do not answer in time."""
        acted = Force.NONE
        deadline = float("inf") if self._limit is None else time.monotonic() + self._limit + LATE
        while not self._over.wait(POLL):
            late = time.monotonic() > deadline
            force = max(control.force, Force.TERM if control.left else Force.NONE)
            for group in self._groups:
                if group.over or group.given_up:
                    continue
                if late:
                    self._give_up(group, f"no answer within {LATE:g} s after the time limit")
                elif force is Force.GIVE_UP or (force and not group.begun):
                    self._give_up(group, "interrupted before it answered")
                elif force > acted and group.relay is not None:
                    grace = 0.0 if force is Force.KILL else GRACE
                    stop: StopCommands = {"op": "stop", "grace": grace}
                    group.relay.send(stop)
            acted = force

    def _give_up(self, group: _Group, why: str) -> None:
        # The closed connection ends the commands, if they have started.
        group.given_up = True
        if group.connection is not None:
            group.connection.close()
        self._end(group, lambda host: ConnectError(host, ATTEMPTED, why))

    def _end(self, group: _Group, error: Callable[[str], NodeError]) -> None:
        """End all commands of a group that have not ended."""
        for number, target in enumerate(group.targets):
            if number not in group.reported:
                self._events.put((group, number, Outcome(target.host, error=error(target.host))))

    def _put_output(self, group: _Group, number: int, stream: str, data: bytes) -> None:
        while not self._over.is_set():
            if self._room.acquire(timeout=POLL):
                self._events.put((group, number, (stream, data)))
                return

    def _follow(self, group: _Group) -> None:
        via, python = group.targets[0].via, group.targets[0].python
        failure: NodeError
        try:
            group.connection = connection = self._transport.connect(via)
            if group.given_up:
                connection.close()
                return
            process = node_program.start(connection, "command", python, label="exec")
            process.write(protocol.encode_command(self._request(group)))
            group.relay = relay = RelayChannel(via.name, connection, process, python, ATTEMPTED)
            with answer_of(via.name, ATTEMPTED):
                for frame in relay.frames():
                    self._take(group, frame)
            if len(group.reported) == len(group.targets):
                return
            failure = relay.failure()
        except NodeError as error:
            failure = error
        except Exception as fault:  # noqa: BLE001  the caller's thread raises it
            self._events.put((group, 0, fault))
            return
        finally:
            if group.connection is not None:
                group.connection.close()
        if not group.given_up:  # otherwise the closed connection is the failure
            self._end(group, lambda host: failure)

    def _request(self, group: _Group) -> CommandRequest:
        commands = [[*target.prefix, *self._argv] for target in group.targets]
        return {"commands": commands, "hidden": self._hidden, "limit": self._limit, "grace": GRACE}

    def _take(self, group: _Group, frame: protocol.Message | protocol.Data) -> None:
        """Raises ProtocolError for what the program never sends."""
        if isinstance(frame, protocol.Data):
            number, fd = divmod(frame.stream - 1, 2)
            if not 0 <= number < len(group.targets):
                raise ProtocolError(f"data of an unknown stream ({frame.stream})")
            self._put_output(group, number, ("stdout", "stderr")[fd], frame.payload)
            return
        message = messages.read_message(frame.body)
        if isinstance(message, Bye):
            return
        if message.command >= len(group.targets) or message.command in group.reported:
            raise ProtocolError(f"the end of a command that does not run ({message.command})")
        target = group.targets[message.command]
        code = message.code
        if code is None and message.signal is None:
            raise ProtocolError("a command ended without a status")
        outcome = Outcome(target.host, code, message.signal, message.late, message.reason)
        group.reported.add(message.command)
        self._events.put((group, message.command, outcome))
