"""Processes untrusted data in a child process, which may fail without harm."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import time

from dtrain.node.agent.processes import look, send
from dtrain.node.agent.sweep import HELPERS, STARTING
from dtrain.node.agent.wire import encode, write_all
from dtrain.node.agent.worker_files import decode
from dtrain.node.files import close_others

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from dtrain.node.agent.wire import Json


def in_child(work: Callable[[], Json], seconds: float, memory: int, answer: int) -> Json | None:
    """The result of ``work``. None if it fails, takes longer than ``seconds``, needs more than
    ``memory`` bytes, or if its result takes more than ``answer`` bytes as JSON."""
    reading, writing = os.pipe()
    try:
        with STARTING:
            pid = os.fork()
            if pid:
                HELPERS.add(pid)
    except OSError:  # too many processes
        os.close(reading)
        os.close(writing)
        return None
    if pid == 0:
        try:
            # It may outlive the run, whose ports and sockets must not stay open.
            close_others(writing)
            gc.disable()  # slow with many small objects
            limit_child(seconds, memory)
            write_all(writing, encode(work()))
        except BaseException:  # noqa: BLE001 - no answer means failure
            pass
        finally:
            os._exit(0)
    child = look(pid)
    os.close(writing)
    data = b""
    deadline = time.monotonic() + seconds
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    try:
        while len(data) <= answer:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                return None
            part = os.read(reading, 1 << 16)
            if not part:
                return decode(data)
            data += part
        return None
    finally:
        os.close(reading)
        if child is not None:
            send(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # the supervisor has reaped it
            os.waitpid(pid, 0)
        HELPERS.discard(pid)


def limit_child(seconds: float, memory: int) -> None:
    import resource

    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    for kind, most in (
        (resource.RLIMIT_AS, used + memory),
        (resource.RLIMIT_CPU, int(seconds) + 1),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
