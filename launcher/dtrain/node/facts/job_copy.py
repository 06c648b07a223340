"""Facts about the job's interpreter, from a copy of this process.

The agent runs in the job's interpreter, but without site packages. A copy of this process adds
them, and then finds what a new Python would find, in a third of the time.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time

from dtrain.node.facts.code import why_unsafe_to_run
from dtrain.node.facts.files import expand, folder_to_run_in
from dtrain.node.facts.programs import CHILDREN, MAY_START, end_group
from dtrain.node.files import close_others, find_program
from dtrain.node.interpreter import look, to_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.facts.orders import GatherOrder

OTHER_START = ("LD_", "GLIBC_")
"""How variables begin that may keep a Python from starting which starts without them."""


def starts_like_us(request: GatherOrder) -> bool:
    """Whether a new Python of the job could differ from this one only by its site packages."""
    python, own = request["python"], request["environment"]
    path = expand(python) if python.startswith("~/") else python
    if "/" not in path:
        path = "" if "PATH" in own else find_program(path) or ""
    variables = any(name.startswith("PYTHON") for name in (*os.environ, *own))
    other = any(name.startswith(OTHER_START) for name in own)
    return path == sys.executable and not request["setup"] and not variables and not other


class JobCopy:
    """Looks at the job's interpreter. Raises OSError if this host starts no more processes.

    Created before the probes run in their threads: the copy has no other thread than this one, so
    a lock that another one holds would never be free there.
    """

    def __init__(self, request: GatherOrder) -> None:
        self._reading, writing = os.pipe()
        try:
            with MAY_START:
                self._pid = os.fork()
                if self._pid:
                    CHILDREN.add(self._pid)
        except OSError:
            os.close(self._reading)
            os.close(writing)
            raise
        if self._pid == 0:
            try:
                report(writing, request)
            finally:
                os._exit(1)
        os.close(writing)
        with contextlib.suppress(OSError):
            os.setpgid(self._pid, self._pid)

    def said(self, limit: float) -> bytes | None:
        """The copy's report. None if it does not end within ``limit`` seconds.

        Does not wait for background processes that keep the pipe open.
        """
        deadline = time.monotonic() + limit
        said, part = b"", b"."
        with open(self._reading, "rb", 0) as pipe:
            while part and not said.endswith(b"\n"):
                left = max(0.0, deadline - time.monotonic())
                if not select.select([pipe], [], [], left)[0]:
                    break
                part = pipe.read(1 << 16)
                said += part
        end_group(self._pid)
        os.waitpid(self._pid, 0)
        return None if part and not said.endswith(b"\n") else said


def report(writing: int, request: GatherOrder) -> None:
    """Write the facts that `dtrain.node.interpreter` reports, or nothing if a launch would not run
    the job's code. Runs in the copy."""
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # site packages may print
        os.dup2(null, fd)
    # A thread of the agent that reads from the old one holds its lock.
    sys.stdin = os.fdopen(0, closefd=False)
    # Site packages may leave a process behind, and the launcher waits for the end of our output.
    close_others(0, 1, 2, writing)
    if why_unsafe_to_run(request) is not None:
        return
    os.chdir(folder_to_run_in(request))
    os.environ.update(request["environment"])
    import site

    # It would obey the flag -s, which is for the agent.
    site.ENABLE_USER_SITE = (os.getuid(), os.getgid()) == (os.geteuid(), os.getegid())
    site.main()
    sys.path.insert(0, "")
    with os.fdopen(writing, "w") as pipe:
        pipe.write(to_json(look(request["interpreter"]["options"])) + "\n")
