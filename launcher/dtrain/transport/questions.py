"""Questions to the user at the terminal: passphrases of keys, and prompts of servers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

WITHDRAW_SECONDS = 2.0
"""Seconds that `Questions.close` waits for an ``ask`` that does not look at ``unwanted``."""


def never() -> bool:
    return False


class NoLongerWantedError(Exception):
    """The answer was no longer needed when it was the question's turn."""


class Ask(Protocol):
    """Asks the user one question."""

    def __call__(
        self, prompt: str, /, *, echo: bool = False, unwanted: Callable[[], bool] = never
    ) -> str | None:
        """The answer. The terminal shows it while the user types only if ``echo`` is true.

        Returns None if the user does not answer, or once ``unwanted`` returns true because the
        answer is no longer needed.
        """


class Questions:
    """Asks one question at a time, from many threads: a question waits until the previous one is
    answered.

    A call raises NoLongerWantedError if ``unwanted`` is true before its turn.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._turn = threading.Lock()
        self._closed = threading.Event()

    def __call__(
        self, prompt: str, /, *, echo: bool = False, unwanted: Callable[[], bool] = never
    ) -> str | None:
        with self._turn:
            if unwanted():
                raise NoLongerWantedError
            if self._closed.is_set():
                return None
            return self._ask(
                prompt, echo=echo, unwanted=lambda: self._closed.is_set() or unwanted()
            )

    def close(self) -> None:
        """Withdraw the open question, and ask no other. Without this, a process that ends would
        leave the terminal as the question needs it."""
        self._closed.set()
        if self._turn.acquire(timeout=WITHDRAW_SECONDS):
            self._turn.release()
