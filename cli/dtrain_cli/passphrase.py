"""Asking for a passphrase on the terminal, so that Ctrl-C still ends the launch.

`getpass` would wait on for an answer in a thread that no signal reaches.
"""

from __future__ import annotations

import os
import select
import termios
from collections.abc import Callable

POLL = 0.1
"""Seconds between two looks at whether the answer is still wanted."""
LONGEST = 4096
"""A terminal hands over no longer line."""


def ask(prompt: str, cancelled: Callable[[], bool]) -> str | None:
    """One line typed without echo; None for an empty answer, without a terminal, or once
    ``cancelled`` says so."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        before = termios.tcgetattr(terminal)
        silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
        termios.tcsetattr(terminal, termios.TCSAFLUSH, silent)
        try:
            os.write(terminal, prompt.encode())
            while not cancelled():
                if select.select([terminal], [], [], POLL)[0]:
                    answer = os.read(terminal, LONGEST).decode(errors="surrogateescape")
                    return answer.rstrip("\n") or None
            return None
        finally:
            termios.tcsetattr(terminal, termios.TCSAFLUSH, before)
            os.write(terminal, b"\n")
    except (OSError, termios.error):
        return None
    finally:
        os.close(terminal)
