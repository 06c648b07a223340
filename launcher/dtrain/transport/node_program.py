"""Starts dtrain's programs on a host, and explains why one did not start."""

from __future__ import annotations

from contextlib import suppress

from dtrain.diagnostics import ConnectError, NodeError, PrepareError
from dtrain.failures.cause import signal_name
from dtrain.node.boot import NOT_KEPT, REPLACED, TOO_OLD
from dtrain.node.programs import boot_command, bundled, bundled_before
from dtrain.transport.contract import Connection, RemoteProcess

NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Exit statuses of a shell."""
END = 5.0
"""Seconds to wait for a program to exit after the end of its output."""
MAX_PRINTED = 2000
"""Characters of a program's output that an error shows."""


def start(
    connection: Connection, name: str, python: str, *, label: str, kept: bool = False
) -> RemoteProcess:
    """Start the program ``name`` of `dtrain.node.programs` with ``python`` on the host. With
    ``kept``, one that the host has kept, see `is_missing`.

    The program reads what the caller writes next. ``label`` appears in the host's process list.
    Raises ConnectError.
    """
    process = connection.start(boot_command(python, label))
    process.write(bundled_before(name) if kept else bundled(name))
    return process


def is_missing(process: RemoteProcess, output: bytes) -> bool:
    """Whether a program ended because the host has not kept it. ``output``: as for `failure`."""
    with suppress(TimeoutError, ConnectError):
        process.wait(END)
    return NOT_KEPT.encode() in process.stderr() + output


def failure(
    host: str, attempted: str, python: str, process: RemoteProcess, output: bytes
) -> NodeError:
    """The error for a program that ended too early: a ConnectError if its connection ended.
    ``output`` is what it printed outside the protocol, often a message of the shell or of
    Python."""
    try:
        status = process.wait(END)
    except TimeoutError:
        status = None
    except ConnectError as error:
        return error
    said, shown = (text.decode("utf-8", "replace").strip() for text in (process.stderr(), output))
    printed = f"{said}\n{shown}".strip()
    # A version manager (pyenv) explains itself in several lines.
    why = f" ({said[-MAX_PRINTED:]})" if said else ""
    hint = (
        "set cluster.python to the path of a Python 3.8 or newer on the host, such as bin/python"
        " of an environment"
    )
    if status == TOO_OLD:
        last = said.rpartition("\n")[2].removeprefix("dtrain: ")
        reason = f"{python} cannot run dtrain: {last or 'it is too old'}"
    elif status == REPLACED:
        reason = f"another shell ran there in place of {python}"
        hint = (
            "look for `exec` in the login scripts there (or a ForceCommand of its sshd): only a"
            " terminal should get another shell, as in `[ -t 0 ] && exec zsh`"
        )
    elif status == NOT_FOUND:
        reason = f"there is no {python}{why}"
    elif status == NOT_EXECUTABLE:
        reason = f"{python} cannot be executed{why}"
    elif status is not None and status < 0:
        name = signal_name(-status) or f"signal {-status}"
        reason = f"dtrain's process there was killed by {name}"
        hint = (
            "the host may be out of memory or shut down, or end the processes of a login (systemd's"
            " KillUserProcesses): search `dmesg` and `journalctl` there"
        )
    else:
        how = "ended" if status is None else f"ended with status {status}"
        reason = f"the program that dtrain started with {python} {how}"
        reason += f": {printed[-MAX_PRINTED:]}" if printed else ""
        hint = (
            "log in there: its memory may be full, its Python damaged, the account may have no full"
            " shell, or a login script (or a ForceCommand of its sshd) may exit or read its input"
        )
    return PrepareError(host, attempted, reason, hint=hint)
