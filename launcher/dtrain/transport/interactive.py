"""Keyboard-interactive authentication (RFC 4256): the server asks, the user answers.

The server may be hostile. So the number and length of its questions have limits, control
characters are removed, and each displayed line starts with ``user@host``: a server cannot
imitate a question of dtrain itself.
"""

from __future__ import annotations

import queue
import re
import threading
import time

import paramiko
from paramiko.common import cMSG_USERAUTH_INFO_RESPONSE

from dtrain.framing import clean
from dtrain.node.waiting import next_item
from dtrain.records import dataclass
from dtrain.transport.login_handler import LoginHandler
from dtrain.transport.questions import Ask, NoLongerWantedError

MAX_ROUNDS = 10
"""Requests in one attempt. Each request can contain several questions."""
MAX_PROMPTS = 8
MAX_TEXT = 4096
"""Bytes read of each text from the server."""
MAX_LINES = 40
MAX_LINE = 200
RESPONSE_TIMEOUT = 120.0
"""Seconds for the server to verify all answers of a login: it may wait for a phone. sshd's
own limit for a login (LoginGraceTime) is the same."""


class InteractionError(Exception):
    """The questions did not lead to a login. The message contains the reason."""


@dataclass(frozen=True, slots=True)
class _Request:
    introduction: bytes
    prompts: tuple[tuple[bytes, bool], ...]
    """Each question, and whether the terminal may show the answer."""


class Interaction(LoginHandler):
    """One attempt. Each displayed line starts with ``who``. ``patience`` is how many seconds are
    left for the server to verify answers.

    paramiko asks in the thread that runs the connection. Here that thread only forwards requests,
    so dtrain detects the end of the connection while the user types.
    """

    def __init__(self, transport: paramiko.Transport, who: str, patience: float) -> None:
        super().__init__(transport)
        self._who = who
        self._received = 0
        self.patience = patience
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self.asked = 0
        """Number of questions that the user answered or declined."""

    def run(self, user: str, ask: Ask, timeout: float) -> list[str]:
        """Returns the methods that the server requires in addition; none if the user is logged in.
        ``timeout`` limits the wait for the server's first response, in seconds.

        Raises InteractionError if the user gives no answer or a limit is exceeded, and what
        paramiko's ``auth_interactive`` raises.
        """
        finished = threading.Event()
        self.auth_interactive(user, None, finished)  # type: ignore[arg-type]
        for number in range(MAX_ROUNDS + 1):
            request = self._next_request(timeout) if number == 0 else self._next_after_answers()
            if request is None:
                break
            if number == MAX_ROUNDS:
                raise InteractionError(f"it asked more than {MAX_ROUNDS} times in a row")
            if len(request.prompts) > MAX_PROMPTS:
                raise InteractionError(f"it asked more than {MAX_PROMPTS} questions at once")
            self._reply(self._answers(request, ask))
        return list(self.wait_for_response(finished))

    def _next_request(self, timeout: float) -> _Request | None:
        try:
            return next_item(self._requests, timeout)
        except queue.Empty:
            raise InteractionError("it did not respond in time") from None

    def _next_after_answers(self) -> _Request | None:
        started = time.monotonic()
        try:
            return self._next_request(self.patience)
        finally:
            self.patience -= time.monotonic() - started

    def _answers(self, request: _Request, ask: Ask) -> list[str]:
        introductions = [request.introduction, *[b""] * len(request.prompts)]
        return [
            self._answer(introduction, prompt, echo, ask)
            for introduction, (prompt, echo) in zip(introductions, request.prompts, strict=False)
        ]

    def _answer(self, introduction: bytes, prompt: bytes, echo: bool, ask: Ask) -> str:
        lines = [*_lines(introduction), *(_lines(prompt) or [""])]
        text = "\n".join(f"{self._who}: {line}" for line in lines)
        try:
            answer = ask(
                text if text.endswith(" ") else f"{text} ",
                echo=echo,
                unwanted=lambda: not self.transport.is_active(),
            )
        except NoLongerWantedError:
            raise EOFError from None
        self.asked += 1
        if answer is None and self.transport.is_active():
            raise InteractionError("the user gave no answer")
        if answer is None:
            raise EOFError
        return answer

    def _reply(self, answers: list[str]) -> None:
        response = paramiko.Message()
        response.add_byte(cMSG_USERAUTH_INFO_RESPONSE)
        response.add_int(len(answers))
        for answer in answers:
            response.add_string(answer.encode("utf-8", "surrogateescape"))
        self.transport._send_user_message(response)  # type: ignore[attr-defined]

    def _parse_userauth_info_request(self, message: paramiko.Message) -> None:
        self._received += 1
        if self._received > MAX_ROUNDS + 1:
            return  # A server that does not wait for answers must not fill the memory.
        name, instruction = message.get_binary()[:MAX_TEXT], message.get_binary()[:MAX_TEXT]
        message.get_binary()
        count = min(message.get_int(), MAX_PROMPTS + 1)
        prompts = tuple(
            (message.get_binary()[:MAX_TEXT], message.get_boolean()) for _ in range(count)
        )
        self._requests.put(_Request(name + b"\n" + instruction, prompts))

    def _parse_userauth_success(self, message: paramiko.Message) -> None:
        super()._parse_userauth_success(message)  # type: ignore[misc]
        self._requests.put(None)

    def _parse_userauth_failure(self, message: paramiko.Message) -> None:
        super()._parse_userauth_failure(message)  # type: ignore[misc]
        self._requests.put(None)

    def abort(self) -> None:
        """paramiko calls this when the connection ends."""
        super().abort()
        self._requests.put(None)


def _lines(text: bytes) -> list[str]:
    """The lines of a server's text, safe to display."""
    lines = re.split(r"\r\n|\r|\n", text.decode(errors="replace"))
    shown = [clean(line)[:MAX_LINE] for line in lines[:MAX_LINES]]
    return [line for line in shown if line.strip()]
