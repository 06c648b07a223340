"""Reads the stacks of Python processes with py-spy."""

from __future__ import annotations

import contextlib
import os
import time

from dtrain.node.agent.processes import environment_of, read_file
from dtrain.node.agent.wire import MAX_TRACEBACK, shown

SPY_LIMIT = 10.0
"""Seconds for py-spy to read the stacks of all workers."""


def spy_command(pid: int) -> list[bytes]:
    """The command that prints a process's Python stack, with the py-spy of its own environment.
    Empty if there is none."""
    environment = environment_of(pid)
    try:
        python = os.readlink(b"/proc/%d/exe" % pid)
    except OSError:  # it has ended
        return []
    # In a virtual environment, argv[0] is a link to the base Python.
    called = (read_file("/proc/%d/cmdline" % pid) or b"").partition(b"\0")[0]
    paths = environment.get(b"PATH", b"").split(b":")
    places = [os.path.dirname(called), os.path.dirname(python), *paths]
    virtual = environment.get(b"VIRTUAL_ENV")
    if virtual:
        places.insert(0, virtual + b"/bin")
    root = b"/proc/%d/root" % pid  # of its container, if it runs in one
    for place in places:
        program = os.path.join(root + place, b"py-spy")
        if place.startswith(b"/") and os.access(program, os.X_OK):
            return [program, b"dump", b"--full-filenames", b"--pid", b"%d" % pid]
    return []


def spy(pids: list[int]) -> dict[int, str]:
    """The Python stacks by process id, of the processes that have a py-spy that can read them."""
    import subprocess  # slow to import, and rarely needed

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
            output = process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0]
        # Its status is unknown if the supervisor has reaped it.
        if output:
            found[pid] = shown(output[:MAX_TRACEBACK])
    return found
