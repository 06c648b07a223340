"""Commands on this machine, where the contract does not cover them."""

from __future__ import annotations

import errno
import os
import subprocess
import threading

import pytest

from dtrain.diagnostics import ConnectError
from dtrain.spec.model import Host
from dtrain.transport.local import LocalTransport
from support.limits import HANG


@pytest.mark.parametrize(
    ("free", "command", "code"), [(0, "sleep 1000", -9), (1, "sleep 1000", -9), (1, "exit 7", 7)]
)
def test_a_machine_without_a_free_thread(
    monkeypatch: pytest.MonkeyPatch, free: int, command: str, code: int
) -> None:
    """The command does not run on without a thread that reads its output or reaps it. If it ends by
    itself, the thread that reaps it may be first."""
    commands: list[subprocess.Popen[bytes]] = []
    left = [threading.Thread.start] * free

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *argv: object, **options: object) -> None:
            super().__init__(*argv, **options)  # type: ignore[call-overload]
            commands.append(self)

    def start(thread: threading.Thread) -> None:
        if not left:
            if code >= 0:
                commands[0].wait(HANG)
            raise RuntimeError("can't start new thread")
        left.pop()(thread)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    monkeypatch.setattr(threading.Thread, "start", start)
    connection = LocalTransport().connect(Host("here", "127.0.0.1", transport="local"))
    with pytest.raises(ConnectError, match=r"here: starting a command .*: can't start") as caught:
        connection.start(command)
    assert "ulimit" in caught.value.hint
    assert commands[0].returncode == code
    pipes = (commands[0].stdin, commands[0].stdout, commands[0].stderr)
    assert all(pipe is not None and pipe.closed for pipe in pipes)


def test_a_command_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(subprocess, "Popen", fail)
    connection = LocalTransport().connect(Host("here", "127.0.0.1", transport="local"))
    with pytest.raises(ConnectError, match=r"/bin/sh: too many open files$"):
        connection.start("true")
