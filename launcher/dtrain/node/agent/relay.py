"""The process on the SSH channel: it forwards commands and sends new data."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time

from dtrain.node.agent.containers import remove
from dtrain.node.agent.control import lives, machine_id, peer_of
from dtrain.node.agent.events import MAX_EVENTS
from dtrain.node.agent.evidence import tail_of
from dtrain.node.agent.folder import folder_of, trust_of
from dtrain.node.agent.follower import Follower
from dtrain.node.agent.launch import Launch
from dtrain.node.agent.launcher_channel import LauncherChannel
from dtrain.node.agent.open_files import raise_limit
from dtrain.node.agent.processes import look, name_list, reap, send
from dtrain.node.agent.run_state import RESTARTED, RunState
from dtrain.node.agent.spawn import cannot_start
from dtrain.node.agent.supervisor_connection import UNSEEN, SupervisorConnection
from dtrain.node.agent.sweep import Sweep, Tag
from dtrain.node.agent.wire import PREAMBLE, VERSION, RefusedError, raw, shown
from dtrain.node.agent.worker_files import MAX_READ
from dtrain.node.files import read_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

    from dtrain.node.agent.commands import AttachRequest, FirstCommand, LaunchRequest
    from dtrain.node.agent.wire import Json
    from dtrain.node.importer import Importer

QUICK, SLOW = 0.005, 0.1
"""Seconds between two reads of files that grow, and of files that do not."""
ALONE = 60
"""Seconds without a command after which the relay ends. The launcher pings every 5 seconds, so it
no longer reads what the relay may be waiting to write."""
MOST = 10**6
"""The longest lease in seconds that the relay waits for: `signal.alarm` takes no large numbers."""
EXIT_LIMIT = 2.0
"""Seconds for a supervisor to exit after its `ended` event."""


class Relay:
    """The process on the channel."""

    def __init__(self, stdin: BinaryIO, importer: Importer) -> None:
        self._stdin = stdin
        self._importer = importer
        self._channel = LauncherChannel()
        self._supervisor = SupervisorConnection()
        self._state: RunState
        self._tag: Tag
        self._containers: Json | None = None
        """As `_state` and `_tag`: of the run that the first command names."""
        self._launch: Launch | None = None
        """The launch that gets the commands until there is a supervisor; None after `attach`."""
        self._patience = ALONE
        self._alarm = threading.Lock()

    def run(self) -> None:
        self._channel.write(PREAMBLE)
        self._channel.report("hello", time=time.time(), pid=os.getpid())
        line = self._stdin.readline()
        if not line:
            return
        try:
            command: FirstCommand = json.loads(line)
            if command.get("protocol") != VERSION:
                raise RefusedError(
                    "agent",
                    "the launcher speaks protocol %s, not %d" % (command.get("protocol"), VERSION),
                )
            if not os.path.exists("/proc/self/stat"):
                linux = sys.platform == "linux"
                raise RefusedError(
                    "agent",
                    "this host runs %s, and has no /proc" % sys.platform,
                    "mount /proc there"
                    if linux
                    else "use Linux hosts: dtrain runs jobs only there",
                )
            folder = folder_of(command)
            self._containers = command["containers"]
            self._state = RunState(folder, trust_of(command))
            self._tag = Tag(command["run"], command["host"], folder)
            if command["op"] == "attach":
                self._attach(command)
            elif command["op"] == "look":
                self._channel.send(self._state.status())
            else:
                self._launch_run(command)
        except RefusedError as refusal:
            self._channel.send(refusal.message)

    def _launch_run(self, command: LaunchRequest) -> None:
        state = self._state
        launch = Launch(command, state, self._tag, self._supervisor, self._importer)
        self._launch = launch
        launch.begin()
        # The user may pause the launcher (Ctrl-Z) until the start. The supervisor gives up after
        # the lease, before this process does, and says why.
        self._expect_commands(2 * ALONE + min(int(command["lease"]), MOST))
        try:
            threading.Thread(target=self._listen, daemon=True).start()
        except RuntimeError as error:
            raise cannot_start(error) from None  # the guard undoes the launch
        answer = launch.finish()
        if answer["type"] != "prepared":
            self._channel.send(answer)
            return
        self._supervisor.pulse.answered()  # until now it was busy
        raise_limit()  # not before: the supervisor is a copy of this process
        state.open_events(self._supervisor.pid)
        follower = Follower(state.folder, self._channel, state.events(), command["interval"])
        follower.open_outputs(command)
        # Only now: a worker may remove its files as soon as it runs.
        self._channel.send(answer)
        self._follow(follower)

    def _attach(self, command: AttachRequest) -> None:
        state = self._state
        try:
            record, sock = state.find_supervisor()
        except FileNotFoundError:
            raise RefusedError(
                "gone",
                "no run %s on this host (%s does not exist)"
                % (command["run"], shown(state.folder)),
            ) from None
        end_previous(command)
        raise_limit()
        pid = peer_of(sock)[0] if sock is not None else 0
        if not state.open_events(pid) and record is None:
            raise RefusedError(
                "agent",
                "run %s is not prepared yet, or a process of the job has removed %s/supervisor"
                % (command["run"], shown(state.folder)),
            )
        if sock is None and record is not None and not state.has_ended():
            if record["machine"] != machine_id():
                self._supervisor.end = RESTARTED
            elif lives(record):
                pid = record["pid"]
                self._supervisor.wait_for(record)
        if pid:  # otherwise the process id may belong to another process by now
            self._supervisor.pulse.watch(pid)
        self._supervisor.open(sock)
        follower = Follower(
            state.folder,
            self._channel,
            state.events(),
            command["interval"],
            offsets=command["offsets"],
            events_only=not command["outputs"],
        )
        self._channel.report("attached")
        self._expect_commands(ALONE)
        threading.Thread(target=self._listen, daemon=True).start()
        self._follow(follower)

    def _follow(self, follower: Follower) -> None:
        """Send new data until the run is over and everything is sent."""
        late = self._supervisor.absent
        unread = MAX_EVENTS // MAX_READ  # times; a process of the job may write without end
        pause = QUICK
        while True:
            self._supervisor.retry(pause)
            heard = self._supervisor.read(0.0 if follower.has_more else pause)
            reap(self._supervisor.child_ended)
            for message in heard or ():
                if message["type"] in ("refused", "bye"):  # it gave up before the start
                    self._channel.send(message)
                    return
            gone = heard is None
            over = follower.ended or gone
            self._answer_launcher()
            progress = follower.send_events()
            if progress and self._patience != ALONE:  # the job has started
                self._expect_commands(ALONE)
            # Processes that survived the end of the run may have ended since.
            unclean = not follower.ended or (late and follower.survived)
            unread -= gone
            if gone and unclean and not (progress and unread > 0):
                self._report_lost(ended=follower.ended)
                follower.ended, late = True, False
                over = True
            progress |= follower.send_outputs(over)
            if progress:
                pause = QUICK
            elif over:
                break
            else:
                pause = min(pause * 2, SLOW)
        # The supervisor is about to exit: after `bye` no process of the run is left.
        until = time.monotonic() + EXIT_LIMIT
        while not gone and time.monotonic() < until:
            gone = self._supervisor.read(QUICK) is None
        if self._supervisor.pid:
            self._supervisor.await_end()  # it closes the connection just before it exits
        self._channel.report("bye")

    def _expect_commands(self, patience: int) -> None:
        """End this process after ``patience`` seconds without a command."""
        # The default action kills: no Python handler runs while a write blocks.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        with self._alarm:
            self._patience = patience
            signal.alarm(patience)

    def _answer_launcher(self) -> None:
        """Report that the relay is alive, and whether the supervisor is."""
        pulse = self._supervisor.pulse
        # First: answers that come while the launcher makes this process wait are not heard.
        pulse.rouse(heard=True)
        if pulse.pinged:
            pulse.pinged = False
            now = time.time()
            self._channel.report("alive", supervisor=pulse.pid, silent=pulse.silent, time=now)
        while pulse.notices:
            self._channel.report("notice", text=pulse.notices.pop(0))

    def _report_lost(self, *, ended: bool) -> None:
        """End the processes of the run in place of the supervisor, and report it. The supervisor
        has died, or has ``ended`` the run, but not all processes."""
        supervisor = self._supervisor
        end = supervisor.await_end()
        take = supervisor.child_ended if supervisor.subreaper else None
        sweep = Sweep(self._tag, 0.0, take, supervisor.subreaper)
        while (pause := sweep.step()) is not None:
            # The launcher gives up a relay that answers no pings.
            supervisor.pulse.answered()
            self._answer_launcher()
            time.sleep(pause)
        remove(self._containers)
        log = tail_of(os.path.join(self._state.folder, b"agent.log"), 5)
        how = "" if end == UNSEEN else ": " + end
        died = "the supervisor died%s%s" % (how, "\n" + log if log else "")
        reason = self._state.why_lost(died, supervisor.end)
        hint = "" if reason == died else "a job must not change the files in $DTRAIN_RUN_DIR"
        if end == RESTARTED:
            reason = RESTARTED
            hint = "look there for the reason: `last -x`, `journalctl --boot=-1`"
        if ended:
            reason, hint = "processes of the run survived its end", ""
        self._channel.report("lost", reason=reason, survivors=name_list(sweep.survivors), hint=hint)
        supervisor.open(None)

    def _listen(self) -> None:
        """Forward commands even while the main thread blocks. Runs in a thread of its own."""
        for line in iter(self._stdin.readline, b""):
            with self._alarm:
                if signal.alarm(0):
                    signal.alarm(self._patience)
            if self._launch is None or self._launch.accepts(line):
                # Pings must not block: they fill the socket of a stopped supervisor.
                pulse = self._supervisor.pulse
                self._supervisor.send(line, socket.MSG_DONTWAIT if pulse.note(line) else 0)
                pulse.rouse(heard=False)  # at once: this may be the last command
        # The launcher has disconnected. The supervisor or the guard undoes an unstarted launch.
        os._exit(0)


def end_previous(command: AttachRequest) -> None:
    """Kill the unresponsive relay that this one replaces, if the launcher names one."""
    pid = command["previous"]
    proc = look(pid) if pid else None
    words = (read_file("/proc/%d/cmdline" % pid) or b"").split(b"\0") if pid else []
    if proc is not None and words[-3:] == [b"dtrain-agent", raw(command["run"]), b""]:
        send(proc, signal.SIGKILL)


def main(stream: BinaryIO, importer: Importer) -> None:
    """The relay: commands follow the program on ``stream``."""
    Relay(stream, importer).run()
    sys.stderr.flush()
    os._exit(0)  # daemon threads and all
