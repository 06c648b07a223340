"""`dtrain exec` when a connection does not come up, and when dtrain itself is wrong."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from dtrain.diagnostics import ExitCode
from dtrain.session.relays.commands import QUEUED, Commands, Receiver, Target
from dtrain.session.stopping.control import Control
from dtrain.spec.model import Host
from dtrain.transport.local import LocalConnection, LocalProcess, LocalTransport
from support.limits import HANG, until


def commands(
    transport: LocalTransport,
    *hosts: str,
    python: str = sys.executable,
    argv: Sequence[str] = ("true",),
) -> Commands:
    targets = [Target(name, Host(name, name, transport="local"), python) for name in hosts]
    return Commands(targets, argv, transport)


def test_a_stop_does_not_wait_for_a_host_that_is_still_connecting() -> None:
    connecting, test_over = threading.Event(), threading.Event()

    class Slow(LocalTransport):
        def connect(self, host: Host) -> LocalConnection:
            if host.name == "slow":
                connecting.set()
                test_over.wait(HANG)
            return super().connect(host)

    control = Control()
    threading.Thread(target=lambda: connecting.wait(HANG) and control.stop(), daemon=True).start()
    outcomes = commands(Slow(), "fast", "slow").run(Receiver(), control)
    test_over.set()
    slow = outcomes[1]
    assert slow.exit_code is ExitCode.NODE_FAILED
    assert slow.error is not None
    assert slow.error.reason == "interrupted before it answered"


def test_a_stop_does_not_wait_for_a_terminal_that_takes_no_output(tmp_path: Path) -> None:
    stopped, pid = threading.Event(), tmp_path / "pid"

    class Slow(LocalTransport):
        def connect(self, host: Host) -> LocalConnection:
            if host.name == "slow":
                stopped.wait(HANG)
            return super().connect(host)

    class Terminal(Receiver):
        def output(self, host: str, stream: str, data: bytes) -> None:
            stopped.wait(HANG)

    control = Control()
    loud = commands(Slow(), "slow", "loud", argv=["sh", "-c", f"echo $$ >{pid}; exec yes"])
    runs = threading.Thread(target=loud.run, args=(Terminal(), control), daemon=True)
    runs.start()
    until(lambda: loud._events.qsize() == QUEUED)
    control.stop()
    until(lambda: not Path("/proc", pid.read_text().strip()).exists())
    stopped.set()
    runs.join(HANG)
    assert not runs.is_alive()


def test_a_stop_does_not_wait_for_a_login_script() -> None:
    class LoggingIn(LocalConnection):
        def start(self, command: str) -> LocalProcess:
            return super().start("echo welcome; exec cat >/dev/null")

    class Slow(LocalTransport):
        def connect(self, host: Host) -> LocalConnection:
            return LoggingIn(host.name)

    control = Control()
    slow = commands(Slow(), "slow")

    def stop() -> None:
        until(lambda: slow._groups[0].relay is not None)
        control.stop()

    threading.Thread(target=stop, daemon=True).start()
    (outcome,) = slow.run(Receiver(), control)
    assert outcome.error is not None
    assert outcome.error.reason == "interrupted before it answered"


def test_the_user_hears_which_hosts_do_not_answer_after_the_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtrain.session.relays.commands.WAITING", 0.0)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    python.chmod(0o755)
    control = Control()

    class Asking(LocalTransport):
        def connect(self, host: Host) -> LocalConnection:
            # As while the user types a password.
            until(lambda: host.name == "silent" or control.interrupted)
            return super().connect(host)

    class Impatient(Receiver):
        def waiting(self, hosts: Sequence[str]) -> None:
            self.late = hosts
            control.stop()

    receiver = Impatient()
    commands(Asking(), "asks", "silent", python=str(python)).run(receiver, control)
    assert receiver.late == ["silent"]


def test_a_fault_in_a_thread_ends_the_command() -> None:
    class Broken(LocalTransport):
        def connect(self, host: Host) -> LocalConnection:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        commands(Broken(), "a", "b").run(Receiver(), Control())
