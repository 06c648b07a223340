"""The program that runs the commands of `dtrain exec`."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from dtrain.node import protocol
from dtrain.node.boot import framed
from dtrain.node.programs import boot_command, program
from support.limits import until


def test_a_slow_launcher_gets_all_output(python: str, tmp_path: Path) -> None:
    """The command ends with its last output in a pipe that is not read at that time."""
    source = program("command").replace(b"LINGER = 1.0", b"LINGER = 0.1")
    # More than one pipe takes, less than two do.
    script = f"echo $$ >'{tmp_path}/pid'; head -c 90000 /dev/zero"
    request = {"commands": [["sh", "-c", script]], "hidden": [], "limit": None, "grace": 5.0}
    pipe = subprocess.PIPE
    argv = ["sh", "-c", boot_command(python, "exec")]
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe) as process:
        assert process.stdin and process.stdout
        process.stdin.write(framed(source) + protocol.encode_command(request))
        process.stdin.flush()
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        pid = (tmp_path / "pid").read_text().strip()
        until(lambda: not Path("/proc", pid).exists())
        threading.Event().wait(0.5)
        received, messages = 0, []
        decoder = protocol.FrameDecoder()
        while data := process.stdout.read(1 << 16):
            for frame in decoder.feed(data):
                if isinstance(frame, protocol.Data):
                    received += len(frame.payload)
                else:
                    messages.append(frame.body)
    assert received == 90_000
    assert [message["type"] for message in messages] == ["exited", "bye"]
    assert messages[0]["code"] == 0


def test_a_stop_ends_what_a_command_has_left(python: str, tmp_path: Path) -> None:
    script = f"(trap '' TERM; exec sh -c 'echo $$ >{tmp_path}/pid; sleep 600') & wait"
    request = {"commands": [["sh", "-c", script]], "hidden": [], "limit": None, "grace": 5.0}
    argv = ["sh", "-c", boot_command(python, "exec")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        process.stdin.write(framed(program("command")) + protocol.encode_command(request))
        process.stdin.flush()
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        # Longer than the command itself and its open output are waited for.
        process.stdin.write(protocol.encode_command({"op": "stop", "grace": 2.0}))
        process.stdin.flush()
        process.stdout.read()
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def ended(python: str, first: str, *command: str) -> dict[str, Any]:
    """How a command ended, if the program that runs it is started by a shell after ``first``."""
    request = {"commands": [command], "hidden": [], "limit": None, "grace": 5.0}
    argv = ["sh", "-c", f"{first}; {boot_command(python, 'exec')}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe) as process:
        assert process.stdin and process.stdout
        process.stdin.write(framed(program("command")) + protocol.encode_command(request))
        process.stdin.flush()
        frames = protocol.FrameDecoder().feed(process.stdout.read())
    message, _ = (frame.body for frame in frames if isinstance(frame, protocol.Message))
    return message


@pytest.mark.parametrize(
    ("most", "program", "reason"),
    [
        (1, "sleep", "cannot start a process: "),
        (2, "sleep", "stopped, because dtrain cannot start a process: "),
        (2, "/no/such/program", "cannot run /no/such/program: "),
    ],
)
def test_a_host_that_starts_no_more_processes(
    python: str, tasks: Path, most: int, program: str, reason: str
) -> None:
    (tasks / "pids.max").write_text(str(most))
    message = ended(python, f"echo $$ >'{tasks}/cgroup.procs'", program, "60")
    assert message["code"] == 127
    assert message["reason"].startswith(reason)
    assert ("`ulimit -u`" in message["reason"]) == (program == "sleep")


def test_a_missing_home_folder_is_not_called_a_missing_program(python: str) -> None:
    message = ended(python, "export HOME=/missing", "true")
    assert message["code"] == 127
    assert message["reason"] == "cannot run true: /missing: No such file or directory"


def test_a_relative_home_folder_starts_at_the_root(python: str) -> None:
    message = ended(python, "export HOME=missing", "true")
    assert message["reason"] == "cannot run true: /missing: No such file or directory"


def test_few_free_descriptors(python: str) -> None:
    assert ended(python, "ulimit -n 20", "true")["reason"] == ""
