"""The shell script that runs the lines of ``job.setup``, for a launch and for the checks."""

from __future__ import annotations

import contextlib
import os
import re
import threading

from dtrain.node.files import find_program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Sequence


def setup_script(
    setup: Sequence[str], command: Sequence[str], *, report: str, hidden: str = ""
) -> str:
    """A script that runs the lines of ``setup`` and becomes ``command``.

    The script writes ``{"type":"setup","line":N}`` to the redirection ``report`` before line N
    runs, and with N = lines + 1 at the end. If a line fails, it writes its ``status`` too and ends.
    ``hidden`` has redirections for the setup lines alone.
    """
    lines = ["unset DTRAIN_SETUP"]
    for number, line in enumerate(setup, 1):
        lines.append("%s %s" % (_printed(number), report))
        failed = "%s $? %s; exit 1" % (_printed(number, ',"status":%d'), report)
        lines.append("eval %s %s || { %s; }" % (_quoted(line), hidden, failed))
    lines.append("%s %s" % (_printed(len(setup) + 1), report))
    lines.append("exec " + " ".join(map(_quoted, command)))
    return "\n".join(lines)


def setup_shell() -> list[str]:
    """The command that runs the script in the variable DTRAIN_SETUP. Setup lines may contain
    secrets, and all users of the host can read command lines."""
    return [find_program("bash") or "/bin/sh", "-c", 'eval "$DTRAIN_SETUP"']


def feed(pipe: int, data: bytes) -> None:
    """Write ``data`` to a pipe and close it, in the background: its reader starts after the setup
    lines."""

    def write() -> None:
        with contextlib.suppress(OSError), os.fdopen(pipe, "wb") as file:  # setup may fail
            file.write(data)

    threading.Thread(target=write, daemon=True).start()


def reported_step(line: str) -> int | None:
    """The number in a report of the script; None for a line of another program."""
    found = re.match(r'\{"type":"setup","line":(\d{1,9})', line)
    return int(found.group(1)) if found else None


def _printed(line: int, rest: str = "") -> str:
    return 'printf \'{"type":"setup","line":%d%s}\\n\'' % (line, rest)


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"
