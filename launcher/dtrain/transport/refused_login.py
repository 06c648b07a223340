"""Explains why a server refused every login that was tried, and what to do."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from dtrain.diagnostics import AuthError
from dtrain.transport.endpoint import Endpoint
from dtrain.transport.keys import AGENT_ONLY, NOT_SIGNED, OfferedKey
from dtrain.transport.login_methods import HOST, KEY, QUESTIONS, TICKET, LoginMethodError

_NAMES = {
    KEY: "a key",
    TICKET: "a Kerberos ticket",
    HOST: "the host key of this machine",
}
_SHORT = {TICKET: "Kerberos", HOST: "host-based"}
_WAYS = {
    TICKET: "run `kinit` and set `GSSAPIAuthentication yes`",
    HOST: "set `HostbasedAuthentication yes`",
}
"""What allows a method that the server accepts."""


class LoginAttempt:
    """What a server has answered so far."""

    def __init__(self) -> None:
        self.interactions = 0
        """How often the server was asked for its questions."""
        self.asked = False
        """Whether the user answered a question, of the server or of the agent."""
        self.methods: list[str] | None = None
        """The methods that the server accepts next. None if it has not listed them yet."""
        self.passed: list[str] = []
        """The methods that the server accepted but that were not sufficient."""
        self.tried: list[str] = []
        """The keys that the server refused."""
        self.acceptable = ""
        """The latest key, if the server would accept it."""
        self.problems: dict[str, LoginMethodError] = {}
        """Why the methods that were tried did not lead to a login."""
        self.unanswered = ""
        """Why the server's questions did not lead to a login."""
        self.hung_up = ""
        """Why the server closed the connection after a refused key or an answer of the user."""

    def may_use(self, method: str) -> bool:
        return method == KEY if self.methods is None else method in self.methods


def refused(
    endpoint: Endpoint, offered: Sequence[OfferedKey], left_out: Sequence[str], login: LoginAttempt
) -> AuthError:
    """``left_out``: the keys that could not be offered, each with its problem."""
    reason, hint = _answer(endpoint, [key.path for key in offered if key.path], login)
    if left_out:
        reason += f" (not tried: {'; '.join(left_out)})"
        hint = _hint_about_keys(endpoint, left_out, login, hint)
    keys_may_help = KEY in endpoint.methods and login.may_use(KEY)
    if login.hung_up and not login.tried:
        keys_may_help = False  # the others come first
    hints = [problem.hint for problem in login.problems.values() if problem.hint]
    if keys_may_help or not login.problems:
        hints.append(hint)
    error = endpoint.error(AuthError, reason, hint=", or ".join(hints) or _compare(endpoint))
    error.asked = login.asked
    return error


def _answer(endpoint: Endpoint, paths: Sequence[Path], login: LoginAttempt) -> tuple[str, str]:
    """What the server did, and what to do."""
    wanted = " or ".join(login.methods or [])
    problems = {_SHORT[method]: str(problem) for method, problem in login.problems.items()}
    if login.unanswered:
        problems[QUESTIONS] = login.unanswered
    why = "".join(f" ({name}: {problem})" for name, problem in problems.items())
    if login.methods == []:
        return (
            "it allows no authentication method",
            "check AuthenticationMethods and PubkeyAuthentication in its sshd_config",
        )
    if login.hung_up:
        return _end(endpoint, why, login)
    if login.passed:
        accepted = " and ".join(dict.fromkeys(_NAMES.get(name, name) for name in login.passed))
        return f"it accepted {accepted} but also requires {wanted}{why}", _hint_about_methods(login)
    if not login.may_use(KEY):
        return f"it accepts no keys, only {wanted}{why}", _hint_about_methods(login)
    if KEY not in endpoint.methods:
        names = " or ".join(_NAMES[name] for name in (TICKET, HOST) if name in endpoint.methods)
        return f"ssh's configuration allows only {names}{why}", _compare(endpoint)
    if login.tried:
        copy = endpoint.copy_id(paths[0] if paths else None)
        hint = (
            f"{_compare(endpoint)}; if not, install a key with `{copy}` or load one with `ssh-add`"
        )
        return f"it refused every key: {'; '.join(login.tried)}{why}", hint
    copy = endpoint.copy_id(None)
    hint = (
        f"create a key with `ssh-keygen` and install it with `{copy}`, or load one with `ssh-add`"
    )
    return f"no key to offer{why}", hint


def _end(endpoint: Endpoint, why: str, login: LoginAttempt) -> tuple[str, str]:
    """When the server closed the connection, and what to do."""
    if login.interactions and login.asked:
        return (
            f"it closed the connection during its questions ({login.hung_up})",
            f"try again, or {_compare(endpoint)}",
        )
    if login.acceptable:
        return (
            f"it accepted {login.acceptable}, but closed the connection ({login.hung_up})",
            "check the account there, such as with `chage -l`, and the log of its sshd",
        )
    after = "a refusal"
    if login.tried:
        after = f"{len(login.tried)} refused keys: {'; '.join(login.tried)}"
    return (
        f"it closed the connection after {after}{why}",
        "set `identity` under `ssh` in the cluster file to the right key",
    )


def _hint_about_keys(
    endpoint: Endpoint, left_out: Sequence[str], login: LoginAttempt, hint: str
) -> str:
    """What to do about the keys that were left out, or else ``hint``."""
    locked = [entry for entry in left_out if ": encrypted" in entry]
    unloaded = [*locked, *(entry for entry in left_out if entry.endswith(AGENT_ONLY))]
    if any(entry.endswith(NOT_SIGNED) for entry in left_out):
        hint = f"confirm the login when the agent asks, and {_compare(endpoint)}"
    if unloaded and login.may_use(KEY):
        files = [
            str(path)
            for path in endpoint.identities
            if any(entry.startswith((f"{path}: ", f"{path} (")) for entry in unloaded)
        ]
        load = f"load the key with `{shlex.join(['ssh-add', *files])}`"
        if login.tried:
            return f"{load}, then {hint}"
        return f"{load}, or run dtrain in a terminal" if locked else load
    if endpoint.identities_first and any(
        entry.startswith(f"{path}: ") for path in endpoint.identities for entry in left_out
    ):
        return "correct `identity` under `ssh` in the cluster file, or the file that it names"
    return hint


def _hint_about_methods(login: LoginAttempt) -> str:
    if not login.may_use(QUESTIONS):
        ways = ", or ".join(way for method, way in _WAYS.items() if login.may_use(method))
        if ways:
            return f"{ways} in ssh's configuration"
        return "dtrain sends no passwords: configure sshd to accept only a key from this user"
    if login.asked:
        return "try again, or configure sshd to accept only a key from this user"
    return "run dtrain in a terminal, or configure sshd to accept only a key from this user"


def _compare(endpoint: Endpoint) -> str:
    return f"check whether `{endpoint.command}` works"
