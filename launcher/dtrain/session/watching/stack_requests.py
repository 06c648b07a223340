"""Requests of another process to see where the workers are: `dtrain stacks`.

A file in the run's folder is a request that is open. The process in charge removes it before it
asks the hosts, and journals their answer.
"""

from __future__ import annotations

import os

from dtrain.runs.folder import RunFolder
from dtrain.runs.storage import storing
from dtrain.runs.stored_file import open_stored

FILE = "stacks-request"


def place(folder: RunFolder) -> None:
    """Raises StorageError."""
    path = folder.path / FILE
    with storing(path):
        os.close(open_stored(path, os.O_WRONLY | os.O_CREAT))


def take(folder: RunFolder) -> bool:
    """Whether there was a request. It is not open any more."""
    try:
        (folder.path / FILE).unlink()
    except OSError:  # there is none, or it cannot be removed and would be answered again and again
        return False
    return True
