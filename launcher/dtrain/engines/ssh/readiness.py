"""Whether a host that has restarted can run the job again.

Its sshd may run before its file servers are mounted: then folders and Python are missing.
"""

from __future__ import annotations

import threading
from pathlib import Path

from dtrain.diagnostics import AuthError, ConnectError
from dtrain.launchplan.plan import HostPlan, LaunchPlan
from dtrain.node.boot import ISOLATED
from dtrain.quoting import path, sh, words
from dtrain.transport import node_program
from dtrain.transport.contract import Connection

SECONDS = 30.0
"""Limit for the answer: a file server that is not there yet blocks programs."""
_ATTEMPTED = "waiting until the host is ready"
_GONE = ": no such folder"
_PROGRAM = (
    "import os,signal,sys;"
    "signal.setitimer(signal.ITIMER_REAL,float(sys.argv[1]));"
    "gone=[f for f in sys.argv[2:] if not os.path.isdir(os.path.expanduser(f))];"
    f'gone and sys.exit(gone[0]+"{_GONE}")'
)
"""Any Python runs it, and every shell passes it on unchanged, see `dtrain.node.boot.boot_text`."""


class Spares:
    """The spares that can replace hosts in the next attempt."""

    def __init__(self, count: int = 0) -> None:
        self._left = count
        self._lock = threading.Lock()

    def claim(self) -> bool:
        """Whether one replaces a host, which then need not be waited for."""
        with self._lock:
            self._left -= 1
            return self._left >= 0


class NotReadyError(ConnectError):
    """The host answers, but something is still missing there."""


def waits(error: ConnectError | AuthError, limit: float) -> str:
    """The notice that a host which has run the job is waited for, for up to ``limit`` seconds.
    Empty if that would ask the user again."""
    if isinstance(error, AuthError) and error.asked:
        return ""
    answers = isinstance(error, AuthError | NotReadyError)
    what = f"is not ready ({error.reason})" if answers else "cannot be reached"
    how_long = f"for up to {limit:g} s (job.restart.node_timeout)"
    return f"{error.host} {what}; waiting for it {how_long}"


def check_ready(connection: Connection, plan: LaunchPlan, part: HostPlan, base: Path) -> None:
    """Raises NotReadyError, or ConnectError if the connection is lost. ``base``: the cluster file's
    folder."""
    folders = ["~"] if plan.run_dir.startswith("~") else []
    if plan.job.sync is None:
        folders.append(part.workdir_from(base))
    python, host = plan.agent_python(part), part.host.name
    # If a file server blocks it, it ends after our wait, so that not each try leaves one behind.
    program = words([_PROGRAM, f"{2 * SECONDS:g}", *folders])
    process = connection.start(str(sh("exec ", path(python), f" {ISOLATED} -c ", program)))
    process.close_stdin()
    try:
        status = process.wait(SECONDS)
    except TimeoutError as error:
        hint = "log in there: a file server may not answer"
        raise NotReadyError(host, _ATTEMPTED, f"{python} is {error}", hint=hint) from None
    finally:
        process.close()
    said = process.stderr().decode("utf-8", "replace").strip().rpartition("\n")[2]
    if said.endswith(_GONE):
        hint = "mount it there, if it is on a file server"
        raise NotReadyError(host, _ATTEMPTED, said, hint=hint)
    if status:
        failure = node_program.failure(host, _ATTEMPTED, python, process, b"")
        raise NotReadyError(host, _ATTEMPTED, failure.reason, hint=failure.hint)
