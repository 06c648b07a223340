"""Stop requests to a launcher that handles no signals, such as a notebook.

A signal would end the whole process. Instead, its run's folder has a file: the first line is the
launcher's process ID, and each further line is one request, ``stop`` or ``kill``.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from dtrain.runs.folder import RunFolder
from dtrain.runs.storage import storing
from dtrain.runs.stored_file import open_stored, stored_reader
from dtrain.session.stopping.control import Control
from dtrain.session.stopping.signals import are_handled

FILE = "stop-requests"
POLL = 0.2
"""Seconds between two reads of the file."""
MAX_BYTES = 4096
WHY = "dtrain stop"


@contextlib.contextmanager
def listening(folder: RunFolder, control: Control) -> Iterator[None]:
    """Pass stop requests to ``control`` inside this context, unless signals do. Raises
    StorageError."""
    if are_handled():
        yield
        return
    path = folder.path / FILE
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with storing(path), os.fdopen(open_stored(path, flags), "w") as file:
        file.write(f"{os.getpid()}\n")
    over = threading.Event()

    def listen() -> None:
        done = 0
        while not over.wait(POLL):
            requests = _lines(folder)[1:]
            for request in requests[done:]:
                if request == "kill":
                    control.kill(WHY)
                else:  # two programs that each request a stop do not mean a kill
                    control.stop(WHY, once=True)
            done = max(done, len(requests))

    thread = threading.Thread(target=listen, name="dtrain-stop-requests", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with contextlib.suppress(OSError):
            path.unlink()


def send(folder: RunFolder, pid: int, *, force: bool) -> bool:
    """Ask process ``pid`` to stop the run. False if it does not read this file."""
    if _lines(folder)[:1] != [str(pid)]:
        return False
    with contextlib.suppress(OSError):
        fd = open_stored(folder.path / FILE, os.O_WRONLY | os.O_APPEND)
        with os.fdopen(fd, "w") as file:
            file.write("kill\n" if force else "stop\n")
        return True
    return False


def _lines(folder: RunFolder) -> list[str]:
    try:
        with stored_reader(folder.path / FILE) as file:
            return file.read(MAX_BYTES).decode(errors="replace").split("\n")[:-1]
    except OSError:
        return []
