"""Prompt the user on the terminal, so that Ctrl-C still ends the launch.

`getpass` would block in a thread that receives no signals.
"""

from __future__ import annotations

import os
import select
import sys
import termios
from collections.abc import Callable
from contextlib import AbstractContextManager

from dtrain.transport.questions import Ask, never
from dtrain_cli.output import without_progress

POLL = 0.1
"""Seconds between two checks whether the prompt was cancelled."""
LONGEST = 4096
"""Bytes; a terminal returns no longer line."""


def ask(prompt: str, cancelled: Callable[[], bool], *, echo: bool = False) -> str | None:
    """Read one line from the terminal, and show it while typing only with ``echo``. Return None
    without a terminal, at the end of input, or when ``cancelled`` returns true."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        before = termios.tcgetattr(terminal)
        shown = before[3] | termios.ECHO if echo else before[3] & ~termios.ECHO
        asked = answered = False
        try:
            while not cancelled():
                # After Ctrl-Z and `fg`, the terminal is as the shell left it.
                if not asked or (not echo and _shows_typing(terminal)):
                    asked = True
                    # Drop input from before the prompt.
                    wanted = [*before[:3], shown, *before[4:]]
                    termios.tcsetattr(terminal, termios.TCSAFLUSH, wanted)
                    os.write(terminal, prompt.encode(errors="backslashreplace"))
                if _has_input(terminal):
                    answer = os.read(terminal, LONGEST).decode(errors="surrogateescape")
                    answered = answer.endswith("\n")
                    return answer.rstrip("\n") if answer else None
            return None
        finally:
            termios.tcsetattr(terminal, termios.TCSAFLUSH, before)
            if not (echo and answered):
                os.write(terminal, b"\n")
    except (OSError, termios.error):
        return None
    finally:
        os.close(terminal)


def _has_input(terminal: int) -> bool:
    """Whether there is something to read; waits up to `POLL` seconds."""
    # `select` takes no descriptor above 1023, and `poll` no terminal of macOS.
    if terminal < 1024:
        return bool(select.select([terminal], [], [], POLL)[0])
    poll = select.poll()
    poll.register(terminal, select.POLLIN)
    return bool(poll.poll(POLL * 1000))


def _shows_typing(terminal: int) -> bool:
    """Whether the terminal shows what is typed for this process. A process in the background would
    be stopped if it changed that."""
    in_front = os.tcgetpgrp(terminal) == os.getpgrp()
    return in_front and bool(termios.tcgetattr(terminal)[3] & termios.ECHO)


def asker(
    pause: Callable[[], AbstractContextManager[object]] = without_progress,
    cancelled: Callable[[], bool] = never,
) -> Ask | None:
    """Return a function that prompts on the terminal while ``pause`` holds the view, or None if
    stdin is not a terminal."""
    if sys.stdin is None or not sys.stdin.isatty():
        return None

    def put(
        text: str, /, *, echo: bool = False, unwanted: Callable[[], bool] = never
    ) -> str | None:
        with pause():
            return ask(text, lambda: cancelled() or unwanted(), echo=echo)

    return put
