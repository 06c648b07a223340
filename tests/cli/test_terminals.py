"""Terminals without color, and terminals without escape sequences at all."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from dtrain_cli.output import notice, progress

CLUSTER = {
    "cluster": {"hosts": ["a"], "transport": "local", "gpus": 0},
    "job": {"framework": "none", "command": ["true"]},
}
COMMANDS = [
    [],
    ["help", "ssh"],
    ["ps"],
    ["plan", "--model-size", "1B", "--gpus", "8"],
    ["check", "cluster.yaml"],
    ["fly"],
]


def on_terminal(folder: Path, argv: list[str], **environment: str) -> str:
    """What a command writes to a terminal of 80 columns."""
    reader, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "dtrain_cli", *argv],
        cwd=folder,
        env={
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HOME": str(folder),
            "TERM": "xterm-256color",
            **environment,
        },
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
    ):
        os.close(terminal)
        shown = b""
        while True:
            try:
                data = os.read(reader, 1 << 16)
            except OSError:  # a terminal that nobody writes to
                data = b""
            if not data:
                break
            shown += data
    os.close(reader)
    return shown.decode()


@pytest.mark.parametrize("argv", COMMANDS, ids=lambda argv: " ".join(argv) or "nothing")
def test_a_dumb_terminal_gets_no_escape_sequence(tmp_path: Path, argv: list[str]) -> None:
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    shown = on_terminal(tmp_path, argv, TERM="dumb")
    assert shown
    assert "\x1b" not in shown
    assert "\r" not in shown.replace("\r\n", "")


@pytest.mark.parametrize(
    "argv", [["help", "ssh"], ["plan", "--model-size", "1B", "--gpus", "8"], ["fly"]]
)
def test_no_color(tmp_path: Path, argv: list[str]) -> None:
    assert "\x1b[" in on_terminal(tmp_path, argv)
    assert "\x1b[" not in on_terminal(tmp_path, argv, NO_COLOR="1")


def test_a_notice_appears_at_once_and_not_behind_the_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Screen(io.BytesIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(screen))
    monkeypatch.setenv("TERM", "xterm")
    with progress("checking"):
        notice("h1 waits")
        assert screen.getvalue() == b"checking\r\x1b[Kdtrain: h1 waits\nchecking"


@contextmanager
def asking(program: str, **pipes: int) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A Python program with a terminal of its own: our end of it, and the process."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        **pipes,
    ) as process:
        yield ours, process
    os.close(ours)
    os.close(theirs)


def read_until(terminal: int, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        seen += os.read(terminal, 1 << 10)
    return seen


def test_a_passphrase_stays_hidden_after_ctrl_z() -> None:
    program = "from dtrain_cli.prompt import ask; ask('Secret: ', lambda: False)"
    with asking(program) as (terminal, _):
        read_until(terminal, b"Secret: ")
        modes = termios.tcgetattr(terminal)
        modes[3] |= termios.ECHO  # as a shell leaves it
        termios.tcsetattr(terminal, termios.TCSANOW, modes)
        read_until(terminal, b"Secret: ")
        assert not termios.tcgetattr(terminal)[3] & termios.ECHO
        os.write(terminal, b"sesame\n")


def test_a_question_beside_a_thousand_connections() -> None:
    program = """if True:
        import os, resource
        from dtrain_cli.prompt import ask
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        while os.dup(0) < 1024:
            pass
        print(ask('Secret: ', lambda: False))
        """
    with asking(program, stdout=subprocess.PIPE) as (terminal, process):
        read_until(terminal, b"Secret: ")
        os.write(terminal, b"sesame\n")
        assert process.communicate() == (b"sesame\n", None)


def test_a_question_stands_alone_on_its_line() -> None:
    program = """if True:
        import os, sys
        from dtrain_cli.output import notice, progress
        from dtrain_cli.prompt import asker
        os.environ["TERM"] = "xterm"
        sys.stderr = open("/dev/tty", "w")
        with progress("checking"):
            asker()("Secret: ")
            notice("h1 waits")
        """
    with asking(program) as (terminal, _):
        shown = read_until(terminal, b"Secret: ")
        os.write(terminal, b"sesame\n")
        shown += read_until(terminal, b"waits\r\n")
    erase = b"\r\x1b[K"
    assert shown.startswith(
        b"checking" + erase + b"Secret: \r\nchecking" + erase + b"dtrain: h1 waits\r\n"
    )
