"""Finds launchers, such as torchrun, in shell scripts: they start a process for each GPU."""

from __future__ import annotations

import contextlib
import re

_LAUNCHER = (
    # At the start of a command: also in a variable that holds it, or as `python -m`. Not in
    # comments, in words to print or to install. A folder of that name has no option behind it.
    rb"""(?m)^(?:(?:(?!(?:^|[ \t])(?:#|echo[ ]|install[ ])).)*?[ \t"'=;&|(/])??"""
    rb"""(torchrun|accelerate[ ]+launch|deepspeed|mpirun|mpiexec|horovodrun"""
    rb"""|torch\.distributed\.(?:run|launch))[ ]+(?:-|\\$|["'$]|\S+\.py\b)"""
)


def launcher_in(path: str) -> str:
    """The program in a shell script that starts a process for each GPU itself. Empty if there is
    none, or the script cannot be read."""
    if not path.endswith(".sh"):
        return ""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        found = re.search(_LAUNCHER, file.read(1 << 16))
        return " ".join(found.group(1).decode().split()) if found else ""
    return ""
