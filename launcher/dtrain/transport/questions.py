"""Questions to the user at the terminal: passphrases of keys, and prompts of servers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol


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


def one_at_a_time(ask: Ask) -> Ask:
    """Make ``ask`` usable from many threads: a question waits until the previous one is answered.

    The returned function raises NoLongerWantedError if ``unwanted`` is true before its turn.
    """
    turn = threading.Lock()

    def wait_and_ask(
        prompt: str, /, *, echo: bool = False, unwanted: Callable[[], bool] = never
    ) -> str | None:
        with turn:
            if unwanted():
                raise NoLongerWantedError
            return ask(prompt, echo=echo, unwanted=unwanted)

    return wait_and_ask
