"""Authenticates the user: with a Kerberos ticket, the host key of this machine, and public keys
in the order of `keys`. Last, with answers to the server's questions (keyboard-interactive) if
the server requires them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import paramiko
from paramiko.common import cMSG_USERAUTH_REQUEST
from paramiko.ssh_exception import BadAuthenticationType

from dtrain.framing import clean
from dtrain.transport.endpoint import Endpoint
from dtrain.transport.host_login import HostLogin, OtherHostKeyError, own_host_keys
from dtrain.transport.interactive import RESPONSE_TIMEOUT, Interaction, InteractionError
from dtrain.transport.kerberos import Context
from dtrain.transport.keys import Keyring, OfferedKey, PublicKey, UnusableKeyError
from dtrain.transport.login_handler import LoginHandler, MethodHandler
from dtrain.transport.login_methods import HOST, KEY, QUESTIONS, TICKET, LoginMethodError
from dtrain.transport.questions import Ask, never
from dtrain.transport.refused_login import LoginAttempt, refused
from dtrain.transport.retry import DroppedError, Transient
from dtrain.transport.ssh_transport import ClientTransport
from dtrain.transport.ticket_login import TicketLogin

ANSWER_TRIES = 3
CONFIRM_SECONDS = 1.0
"""An agent that takes as many seconds to sign has probably asked the user. It does not say so."""
END_SECONDS = 2.0
"""Seconds for the thread of a broken connection to end."""
MOST_SAID = 300
"""Bytes of a server's words that a message shows."""

_PK_OK = 60
"""SSH_MSG_USERAUTH_PK_OK. paramiko defines this number only with its other meaning."""


def authenticate(
    transport: ClientTransport,
    endpoint: Endpoint,
    keyring: Keyring,
    ask: Ask | None,
    timeout: float,
) -> None:
    """Log in as ``endpoint.user`` within ``timeout`` seconds, without the user's time to answer.

    ``ask`` asks the user the server's questions; None if there is no terminal. Raises AuthError if
    the server refuses, and DroppedError if it closes the connection.
    """
    attempt = _Login(transport, endpoint, timeout)
    if attempt.with_nothing():
        return
    candidates, left_out = keyring.candidates(endpoint)
    waiting = list(candidates)
    while not attempt.hung_up:
        method = next(filter(attempt.may_use, attempt.untried), None)
        if method == KEY and not waiting:
            attempt.untried.remove(KEY)
        elif method == KEY:
            candidate = waiting.pop(0)
            try:
                if attempt.with_key(candidate):
                    return
            except UnusableKeyError as problem:
                left_out.append(f"{candidate.label}: {problem}")
                attempt.asked |= candidate.from_agent
        elif method is not None:
            if attempt.with_proof(method):
                return
        elif attempt.may_use(QUESTIONS) and not attempt.unanswered:
            if attempt.with_answers(ask):
                return
        else:
            break
    raise refused(endpoint, candidates, left_out, attempt)


class _Login(LoginAttempt):
    def __init__(self, transport: ClientTransport, endpoint: Endpoint, timeout: float) -> None:
        super().__init__()
        self._transport = transport
        self._endpoint = endpoint
        self._deadline = time.monotonic() + timeout
        self._excused = 0.0
        self._patience = RESPONSE_TIMEOUT
        self.untried = [method for method in endpoint.methods if method != QUESTIONS]
        """The methods still to try, in order. Questions come last: the user answers them."""

    def with_nothing(self) -> bool:
        """Log in without credentials. Some servers (Tailscale) already know the user. Other
        servers reply with their methods."""
        handler = LoginHandler(self._transport)
        return self._request("none", handler, partial(handler.auth_none, self._endpoint.user))

    def with_proof(self, method: str) -> bool:
        """Log in with a ticket or a host key."""
        self.untried.remove(method)
        try:
            return self._with_ticket() if method == TICKET else self._with_host_key()
        except LoginMethodError as problem:
            self._note(method, problem)
            return False

    def _with_ticket(self) -> bool:
        """Log in with the user's default Kerberos ticket."""
        endpoint = self._endpoint
        # Kerberos asks its own server for the ticket of this host.
        with self._excuse():
            context = Context(endpoint.ticket_host, delegate=endpoint.delegates_ticket)
            first = context.step(b"")
        login = TicketLogin(self._transport, endpoint.user, context, first)
        hint = "check with `klist` whose ticket it is, and the log of its sshd"
        return self._prove(login, LoginMethodError("the server refused the ticket", hint))

    def _with_host_key(self) -> bool:
        """Log in with a host key of this machine."""
        endpoint = self._endpoint
        for algorithm, key in own_host_keys(endpoint.algorithms.own_host_keys):
            try:
                with self._excuse():
                    login = HostLogin(self._transport, endpoint.user, algorithm, key)
            except OtherHostKeyError as problem:
                self._note(HOST, problem)
                continue
            if self._prove(login, login.refusal):
                return True
            if self.hung_up or HOST in self.passed or not self.may_use(HOST):
                break
        return False

    def _prove(self, login: MethodHandler, refusal: LoginMethodError) -> bool:
        """Send ``login``. ``refusal`` is the problem if the server does not accept it."""
        method = login.method
        self.problems.setdefault(method, refusal)
        accepted = self._request(method, login, login.request)
        if login.problem:
            self.problems[method] = LoginMethodError(login.problem)
        elif accepted or method in self.passed:
            del self.problems[method]
        return accepted

    def _note(self, method: str, problem: LoginMethodError) -> None:
        self.problems.setdefault(method, problem)
        # The server may not have waited for it.
        self._raise_if_gone(paramiko.SSHException(problem))

    def with_key(self, candidate: OfferedKey) -> bool:
        self.acceptable = ""
        if candidate.public and candidate.may_ask():
            if not self._wanted(candidate.public, candidate.label):
                return False
            self.acceptable = candidate.label
        with self._excuse():
            key = candidate.load()
        handler = LoginHandler(self._transport)

        def sign(done: threading.Event) -> None:
            queued = time.monotonic()
            with self._excuse(), candidate.turn:
                if not self._transport.is_active():  # other logins took too long
                    raise EOFError
                begun = time.monotonic()
                sent = False
                try:
                    handler.auth_publickey(self._endpoint.user, key, done)
                    sent = True
                finally:
                    # If other logins used up the server's patience, a new connection helps.
                    if sent or begun - queued < CONFIRM_SECONDS:
                        self.asked |= time.monotonic() - begun >= CONFIRM_SECONDS

        return self._request(KEY, handler, sign, [candidate.label])

    def with_answers(self, ask: Ask | None) -> bool:
        """Ask the user the server's questions. Called again after a wrong answer."""
        if ask is None or self._endpoint.batch_mode or QUESTIONS not in self._endpoint.methods:
            self.unanswered = (
                "there is no terminal to answer its questions"
                if ask is None
                else "ssh's configuration forbids questions "
                "(BatchMode, KbdInteractiveAuthentication)"
            )
            return False
        if self.interactions == ANSWER_TRIES:
            self.unanswered = "it accepted no answer"
            return False
        self.interactions += 1
        who = f"{self._endpoint.user}@{self._endpoint.host}"

        def ask_without_hurry(
            prompt: str, /, *, echo: bool = False, unwanted: Callable[[], bool] = never
        ) -> str | None:
            with self._excuse():
                return ask(prompt, echo=echo, unwanted=unwanted)

        interaction = Interaction(self._transport, who, self._patience)
        self._transport.auth_handler = interaction
        try:
            self._set_timeout()
            try:
                more = interaction.run(self._endpoint.user, ask_without_hurry, self._left)
            finally:
                self.asked = self.asked or interaction.asked > 0
                self._deadline += self._patience - interaction.patience
                self._patience = interaction.patience
            return self._passed(QUESTIONS, more)
        except BadAuthenticationType as refusal:
            self._next_methods(refusal.allowed_types)
        except InteractionError as problem:
            self.unanswered = str(problem)
        except (paramiko.SSHException, EOFError, OSError) as error:
            self._raise_if_gone(error)
            if not interaction.asked:
                self.unanswered = "it asked nothing"
        return False

    def _request(
        self,
        method: str,
        handler: LoginHandler,
        send: Callable[[threading.Event], None],
        keys: Sequence[str] = (),
    ) -> bool:
        """Whether the server accepts what ``send`` requests through ``handler``. ``keys``: names of
        what it offers."""
        try:
            self._set_timeout()
            answered = threading.Event()
            self._transport.auth_handler = handler
            send(answered)
            return self._passed(method, handler.wait_for_response(answered))
        except BadAuthenticationType as refusal:
            self._next_methods(refusal.allowed_types)
        except (paramiko.SSHException, EOFError, OSError) as error:
            self.tried += keys
            self._raise_if_gone(error)
        return False

    def _passed(self, method: str, more: list[str]) -> bool:
        """Whether the user is logged in now that the server has accepted ``method``."""
        if more:
            self.passed.append(method)
            self._next_methods(more)
        return not more

    def _next_methods(self, names: list[str]) -> None:
        # Messages show these names, which may be hostile.
        self.methods = [clean(name)[:40] for name in names[:8] if name]

    @contextmanager
    def _excuse(self) -> Iterator[None]:
        """Do not count the time that the user takes to answer."""
        started = time.monotonic()
        try:
            yield
        finally:
            taken = time.monotonic() - started
            self._excused += taken
            self._deadline += taken

    def _wanted(self, public: PublicKey, label: str) -> bool:
        """Ask the server whether it would accept the key, without a signature."""
        query = _Query(self._transport, self._endpoint.user, public)
        send = partial(query.auth_publickey, self._endpoint.user, query.placeholder)
        return self._request(KEY, query, send, [label])

    @property
    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _set_timeout(self) -> None:
        left = self._left
        if left <= 0:
            raise DroppedError(
                Transient.SILENT,
                f"authentication took more than {self._endpoint.timeout:g} s",
            )
        self._transport.auth_timeout = left

    def _raise_if_gone(self, error: Exception) -> None:
        if not isinstance(error, paramiko.SSHException):
            # A write has failed. The connection's thread is about to notice it, and to end.
            self._transport.join(END_SECONDS)
        if self._transport.is_active():
            if time.monotonic() >= self._deadline:
                self._set_timeout()
            return
        ended = self._transport.explain()
        said = self._said()
        reason = "; ".join(filter(None, (said, ended)))
        # After an answer, another connection would only prompt the user again.
        refused = self.tried or self.problems
        if self.asked or (refused and "authentication failures" in ended.lower()):
            self.hung_up = reason
            return
        # sshd's LoginGraceTime may have expired while the user typed an answer.
        raise DroppedError(
            Transient.DROPPED,
            f"the server closed the connection during authentication ({reason})",
            excused=self._excused,
            said=bool(said),
        )

    def _said(self) -> str:
        """The server's words to the user about the last request, such as those of pam_nologin."""
        banner = getattr(self._transport.auth_handler, "banner", None) or b""
        text = clean(" ".join(banner[:MOST_SAID].decode(errors="replace").split()))
        return f"it said: {text}" if text else ""


class _Query(LoginHandler):
    """Sends an unsigned request, which the server answers with PK_OK or a failure (RFC 4252,
    section 7). paramiko's client sends only signed requests."""

    def __init__(self, transport: paramiko.Transport, user: str, public: PublicKey) -> None:
        super().__init__(transport)
        self._user = user
        self._public = public
        self.placeholder = paramiko.PKey()

    def _request_login(self, accepted: paramiko.Message) -> None:
        request = paramiko.Message()
        request.add_byte(cMSG_USERAUTH_REQUEST)
        request.add_string(self._user)
        request.add_string("ssh-connection")
        request.add_string(KEY)
        request.add_boolean(False)
        algorithm = self._finalize_pubkey_algorithm(self._public.kind)  # type: ignore[attr-defined]
        request.add_string(algorithm)
        request.add_string(self._public.blob)
        self.transport._send_message(request)  # type: ignore[attr-defined]

    def _parse_pk_ok(self, _message: paramiko.Message) -> None:
        # The thread that waits for the reply takes it as the end of a login.
        self.authenticated = True
        self.abort()

    @property
    def _client_handler_table(self) -> dict[int, Callable[[paramiko.Message], None]]:
        table = dict(super()._client_handler_table)  # type: ignore[misc]
        table[_PK_OK] = self._parse_pk_ok
        return table
