"""Questions to the person at the terminal: passphrases of keys, and what servers ask."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol


def never() -> bool:
    return False


class NoLongerWantedError(Exception):
    """The answer was no longer needed when the question's turn came."""


class Ask(Protocol):
    """Asks a person one question."""

    def __call__(
        self, prompt: str, /, *, echo: bool = False, unwanted: Callable[[], bool] = never
    ) -> str | None:
        """The answer, which is shown while it is typed only with ``echo``. None when nobody
        answers, or once ``unwanted`` says that the answer is no longer needed."""


def one_at_a_time(ask: Ask) -> Ask:
    """``ask`` for many threads: a question waits until the one before it is answered. Raises
    NoLongerWantedError when a question was never put."""
    turn = threading.Lock()

    def wait_and_ask(
        prompt: str, /, *, echo: bool = False, unwanted: Callable[[], bool] = never
    ) -> str | None:
        with turn:
            if unwanted():
                raise NoLongerWantedError
            return ask(prompt, echo=echo, unwanted=unwanted)

    return wait_and_ask
