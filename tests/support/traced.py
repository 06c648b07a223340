"""Processes that a debugger holds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_TRACE = """
import ctypes, os, sys
ATTACH = 16
pid = int(sys.argv[1])
print(ctypes.CDLL(None).ptrace(ATTACH, pid, None, None), flush=True)
if sys.argv[2] == "hold":
    input()
for _ in ("it stops", "it ends"):
    os.waitpid(pid, 0x40000000)
"""


@contextmanager
def traced(pid: int, *, hold: bool = False) -> Iterator[subprocess.Popen[str]]:
    """The tracer of a process, which has stopped. ``hold``: nobody can reap the process once it
    has ended, until its tracer has ended."""
    tracer = subprocess.Popen(
        [sys.executable, "-c", _TRACE, str(pid), "hold" if hold else ""],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert tracer.stdout is not None
        if tracer.stdout.readline() != "0\n":
            pytest.skip("this user may not trace processes")
        yield tracer
    finally:
        tracer.kill()
        tracer.communicate()
