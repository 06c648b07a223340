"""Stacks of Python processes: py-spy reads them, or Python writes them and ends."""

from __future__ import annotations

import os
import signal
import time

from dtrain.node.agent.processes import environment_of, look, send
from dtrain.node.agent.sweep import ABORT_LIMIT, await_ends
from dtrain.node.agent.wire import MAX_TRACEBACK, shown
from dtrain.node.files import read_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.agent.processes import Proc

SPY_LIMIT = 10.0
"""Seconds for py-spy to read the stacks of all workers."""
MAX_PROBLEM = 200
"""Bytes of py-spy's words that are passed on."""


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


def spy(pids: list[int]) -> tuple[dict[int, str], dict[int, str]]:
    """The Python stacks by process id, and of the processes without one, why py-spy has none."""
    import subprocess  # slow to import, and rarely needed

    spies = {}
    problems = {}
    for pid in pids:
        command = spy_command(pid)
        if not command:
            problems[pid] = "no py-spy in the environment"
            continue
        try:
            spies[pid] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except OSError as error:
            problems[pid] = "py-spy does not start: %s" % (error.strerror or error)
    deadline = time.monotonic() + SPY_LIMIT
    found = {}
    for pid, process in spies.items():
        try:
            output, errors = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            errors = errors or b"no answer after %d s" % SPY_LIMIT
        # Its status is unknown if the supervisor has reaped it.
        if output:
            found[pid] = shown(output[:MAX_TRACEBACK])
        else:
            problems[pid] = _why_none(errors)
    return found, problems


def _why_none(errors: bytes) -> str:
    """Why py-spy has no stack, from its stderr. It ends with a trace of py-spy itself."""
    said = errors.partition(b"Stack backtrace")[0]
    if b"permission denied" in said.lower():
        return "the system does not let py-spy read it (see `dtrain help failures`)"
    first = said.partition(b"\n")[0].split(b"Error: ")[-1]
    return "py-spy: " + (shown(first[:MAX_PROBLEM]) or "no output")


def abort_all(procs: list[Proc]) -> None:
    """Send SIGABRT, and wait until the processes have ended. Python's fault handler writes their
    stacks to stderr."""
    # torchrun would end the others as soon as the first has ended.
    parents = [look(pid) for pid in {proc.ppid for proc in procs} - {1, os.getpid()}]
    stopped = [parent for parent in parents if parent is not None]
    try:
        for proc in stopped:
            send(proc, signal.SIGSTOP)
        for proc in procs:
            send(proc, signal.SIGABRT)
        await_ends(procs, ABORT_LIMIT)
    finally:
        for proc in stopped:
            send(proc, signal.SIGCONT)
