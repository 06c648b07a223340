"""Where a Python process is, seen from outside."""

from __future__ import annotations

import contextlib
import os
import time

from dtrain.node.agent.processes import environment_of, read_file
from dtrain.node.agent.wire import MAX_TRACEBACK, shown

SPY_LIMIT = 10.0
"""Seconds for py-spy to look at all workers."""


def spy_command(pid: int) -> list[bytes]:
    """How to have a process's Python stack shown: by the py-spy of its own environment. Empty
    without one."""
    environment = environment_of(pid)
    try:
        python = os.readlink(b"/proc/%d/exe" % pid)
    except OSError:  # it has ended meanwhile
        return []
    # What it was called as: in a virtual environment, a link to the python that it was made from.
    called = (read_file("/proc/%d/cmdline" % pid) or b"").partition(b"\0")[0]
    paths = environment.get(b"PATH", b"").split(b":")
    places = [os.path.dirname(called), os.path.dirname(python), *paths]
    virtual = environment.get(b"VIRTUAL_ENV")
    if virtual:
        places.insert(0, virtual + b"/bin")
    for place in places:
        program = os.path.join(place, b"py-spy")
        if place and os.access(program, os.X_OK):
            return [program, b"dump", b"--full-filenames", b"--pid", b"%d" % pid]
    return []


def spy(pids: list[int]) -> dict[int, str]:
    """The Python stacks of those processes that py-spy is there for, and may look at."""
    import subprocess  # which takes long to import, and is needed once in a run's life at most

    spies = {}
    for pid in pids:
        command = spy_command(pid)
        with contextlib.suppress(OSError):
            if command:
                spies[pid] = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
    deadline = time.monotonic() + SPY_LIMIT
    found = {}
    for pid, process in spies.items():
        try:
            said = process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            said = process.communicate()[0]
        # Its status says nothing: the supervisor may have reaped it.
        if said:
            found[pid] = shown(said[:MAX_TRACEBACK])
    return found
