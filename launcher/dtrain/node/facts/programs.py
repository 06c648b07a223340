"""Runs programs with a time limit, and ends them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time

from dtrain.node.facts.probing import LIMIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

MAX_OUTPUT = 4 << 20
CHILDREN: set[int] = set()
"""Process groups that we started and that may still run."""
STARTING: set[int] = set()
"""Threads that are about to start a process group."""
MAY_START = threading.Lock()
START_LIMIT = 5.0
"""Seconds that `leave` waits for a program to start: its file system may not answer."""


def end_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    CHILDREN.discard(pid)


def leave() -> None:
    """End all programs that we started, and this process."""
    MAY_START.acquire()  # never released
    deadline = time.monotonic() + START_LIMIT
    while STARTING and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in list(CHILDREN):
        end_group(pid)
    os._exit(0)


def run(
    argv: list[str],
    limit: float = LIMIT,
    *,
    cwd: str | None = None,
    environment: dict[str, str] | None,
    feed: bytes = b"",
    pipes: tuple[int, ...] = (),
) -> tuple[int | None, str, str]:
    """Run a program to its end. Returns its status (None if it was killed after ``limit`` seconds),
    stdout and stderr. Raises OSError if it cannot be executed.

    Does not wait for background processes that keep the output open.
    """
    import subprocess  # slow to import, and a launch rarely needs it

    thread = threading.get_ident()
    with MAY_START:
        STARTING.add(thread)
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if feed else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=environment,
            pass_fds=pipes,
            start_new_session=True,
        )
        CHILDREN.add(process.pid)
    finally:
        STARTING.discard(thread)
    for fd in pipes:
        os.close(fd)
    try:
        if process.stdin:
            with contextlib.suppress(OSError):
                process.stdin.write(feed)
                process.stdin.close()
        out, err = _output(process, time.monotonic() + limit)
        return process.poll(), out, err
    finally:
        end_group(process.pid)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()


def _output(process: subprocess.Popen[bytes], deadline: float) -> tuple[str, str]:
    """The first `MAX_OUTPUT` bytes of stdout and stderr, read until the process has ended."""
    from subprocess import TimeoutExpired

    assert process.stdout and process.stderr
    parts: dict[int, list[bytes]] = {process.stdout.fileno(): [], process.stderr.fileno(): []}
    open_fds = set(parts)
    size = 0
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        ready = select.select(list(open_fds), [], [], 0 if ended else 0.05)[0]
        for fd in ready:
            data = os.read(fd, 1 << 16)
            if data and size < MAX_OUTPUT:
                size += len(data)
                parts[fd].append(data)
            elif not data:
                open_fds.discard(fd)
        if ended and not ready:
            break
        if not open_fds:
            with contextlib.suppress(TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            break
    out, err = (b"".join(part).decode("utf-8", "backslashreplace") for part in parts.values())
    return out, err


def plain() -> dict[str, str]:
    """Our environment, with English messages."""
    return {**os.environ, "LC_ALL": "C", "LANGUAGE": ""}
