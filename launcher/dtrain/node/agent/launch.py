"""Prepares a launch: runs the setup lines and starts the supervisor.

The relay forks a guard, which does both. If anything fails, the launcher aborts the launch, or the
relay ends before the launch is prepared, the guard ends all processes of the launch and removes its
folder.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import sys
import threading
from functools import partial

from dtrain.node.agent.control import CONTROL_FD, REQUEST_FD
from dtrain.node.agent.environment import NodeVariables
from dtrain.node.agent.evidence import tail_of
from dtrain.node.agent.folder import (
    cannot_write,
    check_workdir,
    create,
    discard,
    expand,
    make_folder,
    save,
)
from dtrain.node.agent.presentation import can_present
from dtrain.node.agent.processes import reap
from dtrain.node.agent.spawn import cannot_start, spawn, why_not_executed
from dtrain.node.agent.sweep import Sweep, adopt_orphans, load_prctl
from dtrain.node.agent.wire import RefusedError, encode, raw, shown, text
from dtrain.node.boot import ISOLATED, boot_text, bundle
from dtrain.node.files import close_others
from dtrain.node.setup import feed, setup_script, setup_shell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.agent.commands import LaunchRequest, SupervisorRequest
    from dtrain.node.agent.run_state import RunState
    from dtrain.node.agent.supervisor_connection import SupervisorConnection
    from dtrain.node.agent.sweep import Tag
    from dtrain.node.agent.wire import Json
    from dtrain.node.importer import Importer

SUPERVISOR = "dtrain.node.agent.supervisor"
KEEP, UNDO = b"k", b"u"
"""Orders of the relay to the guard."""
NOT_FOUND = 127
"""A shell's exit status for a program that is not on PATH."""


class Launch:
    """One launch, from its command to a supervisor that is ready to start the processes."""

    def __init__(
        self,
        command: LaunchRequest,
        state: RunState,
        tag: Tag,
        supervisor: SupervisorConnection,
        importer: Importer,
    ) -> None:
        self._command = command
        self._workdir = expand(command["workdir"])
        self._folder, self._trust = state.folder, state.trust
        self._tag = tag
        self._supervisor = supervisor
        self._importer = importer
        self._guard = 0
        self._guard_pipe = -1  # carries orders to the guard
        self._aborted = False
        """Whether a command has come before the launch was prepared."""
        self._up = False
        """Whether a supervisor accepts commands."""
        self._lock = threading.Lock()

    def accepts(self, line: bytes) -> bool:
        """Whether a supervisor accepts the command ``line``. Each command but a ping aborts a
        launch that is not prepared. Called by the thread that reads commands."""
        with self._lock:
            self._aborted = self._aborted or b'"ping"' not in line
            return self._up

    def begin(self) -> None:
        """Check the working folder and start the guard. Raises RefusedError."""
        workdir = self._workdir
        if not os.path.isdir(workdir):
            there = os.path.exists(workdir)
            raise RefusedError(
                "workdir",
                "workdir %s %s" % (shown(workdir), "is not a folder" if there else "not found"),
                "create it on this host, or let `job.sync` send your files there",
            )
        if not os.access(workdir, os.X_OK):
            raise RefusedError(
                "workdir",
                "cannot enter workdir %s: permission denied" % shown(workdir),
                "choose a `job.workdir` that you can use on this host",
            )
        # Setup may create the script.
        check_workdir(self._trust, workdir, self._command["script"], complete=False)
        try:
            self._start_guard()
        except OSError as error:
            raise cannot_start(error) from None

    def finish(self) -> Json:
        """Wait until the launch is prepared or undone. Returns the message for the launcher."""
        answer = self._await_prepared()
        with contextlib.suppress(OSError):  # the guard has already undone the launch
            os.write(self._guard_pipe, KEEP)
        os.close(self._guard_pipe)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._guard, 0)
        return answer

    def _start_guard(self) -> None:
        prctl = load_prctl()
        self._supervisor.subreaper = adopt_orphans(prctl)
        ours, theirs = socket.socketpair()
        orders, self._guard_pipe = os.pipe()
        gc.freeze()  # or each collection in a child would copy all pages
        self._guard = os.fork()
        if self._guard == 0:
            try:
                os.setsid()
                close_others(orders, theirs.fileno())
                self._supervisor.subreaper = adopt_orphans(prctl)
                answer = self._stand_guard(orders, theirs)
                if answer is not None:
                    theirs.sendall(encode(answer) + b"\n")
            finally:
                os._exit(0)
        os.close(orders)
        theirs.close()
        self._supervisor.open(ours)

    def _stand_guard(self, orders: int, control: socket.socket) -> Json | None:
        """The guard: create the folder, start the setup shell or the supervisor, and wait for the
        relay's order to keep the launch. If the order does not come or the process ends, undo the
        launch and return the message for the relay.

        The relay may be killed at any moment, so only the guard creates what it may have to undo.
        """
        try:
            folder, created = make_folder(self._trust, self._folder)
        except RefusedError as refusal:
            return refusal.message
        try:
            log = create(b"agent.log", folder, os.O_APPEND)
            for name, content in self._importer.files.items():
                save(raw(name), folder, content)
        except OSError as error:
            message = cannot_write(error, self._folder).message
            discard(self._folder, created)
            return message
        request: SupervisorRequest = {
            **self._command,
            "absolute_workdir": text(self._workdir),
            "folder": text(self._folder),
            "created": [text(path) for path in created],
        }
        failure, exhausted = "", None
        try:
            failure = self._start_supervisor(request, control, log)
        except (OSError, RuntimeError) as error:
            exhausted = cannot_start(error).message
        for fd in (log, folder):
            os.close(fd)
        while not select.select([orders], [], [], 0.02)[0]:
            reap(self._supervisor.child_ended)
            if self._supervisor.pid == 0:
                break
        else:
            if os.read(orders, 1) == KEEP:
                return None
        output = tail_of(os.path.join(self._folder, b"agent.log"), 12)
        Sweep(self._tag, 0.0, self._supervisor.child_ended, self._supervisor.subreaper).finish()
        discard(self._folder, created)
        if exhausted is not None:
            return exhausted
        body = {"type": "undone", "fate": self._supervisor.end, "log": output}
        if failure:
            body["failure"] = failure
        return body

    def _start_supervisor(
        self, request: SupervisorRequest, control: socket.socket, log: int
    ) -> str:
        """Start the supervisor in a copy of this process, or the setup shell, which starts it.
        Returns why that failed, or an empty string."""
        environment = self._environment()
        argv = [sys.executable, ISOLATED, "-c", boot_text('open(%d,"rb")' % REQUEST_FD)]
        argv += ["dtrain-supervisor", request["run"], request["host"]]
        descriptors = {CONTROL_FD: control.fileno()}
        main = None
        if not request["setup"] and can_present():
            from dtrain.node.agent.supervisor import supervise

            main = partial(supervise, request)
        else:
            descriptors[REQUEST_FD] = self._feed(request)
        if request["setup"]:
            script = setup_script(
                request["setup"],
                argv,
                report=">&%d" % CONTROL_FD,
                hidden="%d>&- %d>&-" % (CONTROL_FD, REQUEST_FD),
            )
            environment[b"DTRAIN_SETUP"] = raw(script)
            argv = setup_shell()
        words = [raw(word) for word in argv]
        self._supervisor.pid, failure = spawn(
            words, environment, self._workdir, (log, log), descriptors, main=main
        )
        if REQUEST_FD in descriptors:
            os.close(descriptors[REQUEST_FD])
        return why_not_executed(failure, words[0], environment) if failure else ""

    def _environment(self) -> dict[bytes, bytes]:
        """The environment of the supervisor and of the setup shell."""
        environment = {**os.environb, **self._tag.environment}
        # Setup lines find pip and others of the job's Python.
        variables = self._command["node_variables"]
        path = {"PATH": variables["PATH"]} if "PATH" in variables else {}
        NodeVariables(self._folder, self._workdir).complete(environment, path)
        environment[b"PWD"] = self._workdir  # as after `cd` in a shell
        return environment

    def _feed(self, request: SupervisorRequest) -> int:
        """A pipe from which a new Python reads the supervisor's program and ``request``."""
        reading, writing = os.pipe()
        feed(writing, bundle(SUPERVISOR, self._importer.bundle()) + encode(request))
        return reading

    def _await_prepared(self) -> Json:
        """The supervisor's answer, or ours if the launch ends before there is a supervisor."""
        # Only the guard knows what to undo: the folder and its processes may belong to an earlier
        # run of the same name.
        ran: Json = {"line": 0}
        undoing = False
        while True:
            if self._aborted and not undoing:
                undoing = True
                self._request_undo()
            messages = self._supervisor.read(0.05)
            if messages is None:
                # All processes have been killed, the guard too.
                messages = [{"type": "undone", "fate": self._supervisor.end, "log": ""}]
            for message in messages:
                kind = message["type"]
                if kind == "setup":
                    ran = message
                elif kind == "up":
                    self._supervisor.pid = message["pid"]
                    # Commands that came before are seen in the next turn, if they abort the launch.
                    with self._lock:
                        self._up = True
                    self._supervisor.pulse.watch(message["pid"])
                elif kind == "prepared" and (undoing or self._aborted):
                    continue
                elif undoing:
                    return {"type": "bye"}
                else:
                    return self._why_undone(message, ran) if kind == "undone" else message

    def _request_undo(self) -> None:
        try:
            os.write(self._guard_pipe, UNDO)
        except OSError:  # the guard has handed over
            self._supervisor.send(b'{"op":"abort"}\n')

    def _why_undone(self, message: Json, ran: Json) -> Json:
        """``ran``: the message of the last setup line that ran, with its status if it failed."""
        setup, line, status = self._command["setup"], ran["line"], ran.get("status")
        log = message["log"]
        if "failure" in message:
            return RefusedError("setup" if setup else "agent", message["failure"]).message
        if self._up or not 0 < line <= len(setup):
            where = " after `job.setup`" if setup else ""
            reason = "the supervisor could not start%s (%s)" % (where, message["fate"])
            return RefusedError("agent", reason, log and "it printed:\n" + log).message
        how = "failed with status %d" % status if status is not None else "ended the shell"
        reason = "setup line %d (%s) %s" % (line, setup[line - 1], how)
        remedy = "run the line on the host and correct it"
        if status == NOT_FOUND:
            remedy = (
                "give the whole path of the program, or first read the file that defines the"
                " command, such as `. /etc/profile` for `module`: no login script has run here"
            )
        output = "the setup lines printed:\n" + log if log else "it printed nothing"
        return RefusedError("setup", reason, "%s; %s" % (remedy, output)).message
