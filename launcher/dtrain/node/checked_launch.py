"""The check and the launch of one host, in one program: a second one would start its own Python.

The facts program runs in a child and answers the launcher. After `RELEASE`, or at the end of the
stream, the child ends, with all that it has started and the ports that it holds. Then this process
is the relay. Everything is imported before the fork: afterwards each import would copy pages that
the two processes share.
"""

from __future__ import annotations

import contextlib
import os
import threading

from dtrain.node.agent.relay import main as relay
from dtrain.node.agent.supervisor import supervise  # noqa: F401 - runs in a copy of this process
from dtrain.node.facts.main import main as check
from dtrain.node.facts.wire import RELEASE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

    from dtrain.node.importer import Importer

END_SECONDS = 2.0
"""Seconds to wait for the end of the check: a file system that does not answer may hold it."""


def main(stream: BinaryIO, importer: Importer) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        check(os.fdopen(reading, "rb"), importer)
        os._exit(0)
    os.close(reading)
    over, ended = threading.Event(), threading.Event()

    def watch() -> None:
        with contextlib.suppress(ChildProcessError):  # the relay has reaped it
            os.waitpid(child, 0)
        ended.set()
        if not over.is_set():
            os._exit(1)  # a bug: the launcher sees the end of the output

    threading.Thread(target=watch, daemon=True).start()
    released = False
    for line in iter(stream.readline, b""):
        released = line == RELEASE
        if released:
            break
        os.write(writing, line)
    over.set()
    os.close(writing)
    ended.wait(END_SECONDS)
    if not released:
        os._exit(0)
    relay(stream, importer)
