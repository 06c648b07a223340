"""Finds launchers, such as torchrun, in shell scripts: they start a process for each GPU."""

from __future__ import annotations

import contextlib
import os
import re

_LAUNCHER = (
    # At the start of a command: also in a variable that holds it, or as `python -m`. Not in
    # comments, in words to print or to install. A folder of that name has no option behind it.
    rb"""(?m)^(?:(?:(?!(?:^|[ \t])(?:#|echo[ ]|install[ ])).)*?[ \t"'=;&|(/])??"""
    rb"""(torchrun|accelerate[ ]+launch|deepspeed|mpirun|mpiexec|horovodrun"""
    rb"""|torch\.distributed\.(?:run|launch))[ ]+(?:-|\\$|["'$]|\S+\.py\b)"""
)


def launcher_in(commands: bytes) -> str:
    """The program in shell commands that starts a process for each GPU itself. Empty if there is
    none."""
    found = re.search(_LAUNCHER, commands)
    return " ".join(found.group(1).decode().split()) if found else ""


def launcher_of(path: str) -> str:
    """As `launcher_in`, for a shell script. Empty if it cannot be read."""
    # Opening a FIFO would block.
    with contextlib.suppress(OSError):
        if os.path.isfile(path):
            with open(path, "rb") as file:
                return launcher_in(file.read(1 << 16))
    return ""
