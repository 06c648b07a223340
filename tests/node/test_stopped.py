"""A supervisor that is stopped with SIGSTOP and accepts no more connections."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from contextlib import ExitStack
from io import BytesIO
from typing import Any

import pytest

from dtrain.node.agent import pulse as pulse_module
from dtrain.node.agent import supervisor_connection
from dtrain.node.agent.pulse import Pulse
from dtrain.node.agent.relay import Relay
from dtrain.node.agent.supervisor_connection import SupervisorConnection
from dtrain.node.importer import Importer
from support.limits import HANG
from support.node import Node


def stop_and_fill(host: Node, stack: ExitStack) -> int:
    """Stop the supervisor and fill the queue of its socket. Returns its process id."""
    record = json.loads((host.folder() / "supervisor").read_text())
    pid: int = record["pid"]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(BlockingIOError):
        while True:
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            waiting.connect(record["socket"])
    return pid


@pytest.mark.parametrize("stopped", [False, True], ids=["continues", "is stopped"])
def test_a_relay_waits_for_a_stopped_supervisor(host: Node, *, stopped: bool) -> None:
    agent = host.start(
        host.shell("until test -e go; do sleep 0.05; done"), on_disconnect="keep", grace=0.1
    )
    agent.event("started")
    with ExitStack() as stack:
        pid = stop_and_fill(host, stack)
        agent.kill()
        second = host.attach()
        second.expect("attached")
        second.command("ping")
        second.expect("alive", supervisor=pid)
        if stopped:
            second.command("stop", grace=0.1, reason="Ctrl-C")
            assert f"process {pid}) was stopped: continued it" in second.expect("notice")["text"]
            assert second.event("stopping")["reason"] == "Ctrl-C"
        else:
            os.kill(pid, signal.SIGCONT)
            (host.workdir / "go").touch()
        second.event("ended")
        second.wait()
    host.until_nothing_runs()


def test_only_who_has_read_the_answers_kills_a_silent_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The relay reads none while it writes to a slow launcher, but it takes commands."""
    monkeypatch.setattr(pulse_module, "SILENCE", -1.0)
    with subprocess.Popen(["sleep", "600"]) as supervisor:
        pulse = Pulse()
        pulse.watch(supervisor.pid)
        for line in (b'{"op":"ping"}', b'{"op":"stop","grace":-1}'):
            pulse.note(line)
            pulse.rouse(heard=False)
        assert (supervisor.poll(), pulse.notices) == (None, [])
        pulse.rouse(heard=True)
        assert supervisor.wait(HANG) == -signal.SIGKILL
    assert "did not answer: killed it" in pulse.notices[0]


def test_a_slow_launcher_does_not_make_a_supervisor_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The relay takes pings, but reads no answers, while it waits for the launcher to read."""
    monkeypatch.setattr(pulse_module, "SILENCE", 0.0)
    with subprocess.Popen(["sleep", "600"]) as supervisor:
        relay = Relay(BytesIO(), Importer({}, dict, {}))
        pulse = relay._supervisor.pulse

        reported: list[str] = []

        def report(kind: str, **body: Any) -> None:
            reported.append(kind)
            pulse.note(b'{"op":"ping"}')

        monkeypatch.setattr(relay._channel, "report", report)
        pulse.watch(supervisor.pid)
        pulse.note(b'{"op":"kill"}')
        pulse.pinged = True
        relay._answer_launcher()
        supervisor.kill()
    assert reported == ["alive"]


def test_a_supervisor_that_ends_just_when_a_relay_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    connection = SupervisorConnection()
    connection.wait_for({"socket": "", "pid": os.getpid(), "start": 0})
    connection.send(b'{"op":"kill"}\n')
    monkeypatch.setattr(supervisor_connection, "call_supervisor", lambda _record: ours)
    connection.retry(0.0)
    assert connection.read(0.0) is None
