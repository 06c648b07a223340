"""Names in ssh's options: of hosts, users, files and jump hosts, and tokens in them."""

from __future__ import annotations

import ipaddress
import os
import pwd
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from dtrain.transport.ssh_options import SshConfigError

HOST = re.compile(r"(?!-)[^\s\x00-\x1f\x7f'`\"$\\;&<>|(){},@]+")
USER = re.compile(r"(?!-)(?!.*\s-)(?!.*\\\Z)[^\x00-\x1f\x7f'`\"$%;&<>|(){}]+")
"""The names that OpenSSH accepts, except user names with `$` or `%`, which OpenSSH 10 expands."""

Tokens = Mapping[str, str]
"""The values of tokens such as ``%h``, by their letter."""


def canonical(name: str) -> str:
    """A host name in lower case, or an IP address in its shortest form."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name.lower()


def standard_tokens(
    name: str, address: str, port: str, user: str, alias: str, local_user: str, home: Path
) -> Tokens:
    """The values of the tokens that OpenSSH expands in most options."""
    hostname = socket.gethostname()
    return {
        "d": str(home),
        "h": address,
        "i": str(os.getuid()),
        "k": alias,
        "L": hostname.split(".")[0],
        "l": hostname,
        "n": name,
        "p": port,
        "r": user,
        "u": local_user,
    }


def expand(text: str, tokens: Tokens) -> str:
    """Replace ``%x`` with the value of ``x``, and ``%%`` with ``%``.

    Raises SshConfigError if a token has no value.
    """

    def replacement(match: re.Match[str]) -> str:
        value = "%" if match[1] == "%" else tokens.get(match[1])
        if value is None:
            raise SshConfigError(f"dtrain does not support the token {match[0]} in {text!r}")
        return value

    return re.sub(r"%(.?)", replacement, text, flags=re.DOTALL)


def expand_path(text: str, tokens: Tokens, home: Path) -> str:
    """Expand ``~``, tokens and ``${VARIABLE}`` in a file name. Raises SshConfigError."""

    def replacement(match: re.Match[str]) -> str:
        if match[1] is None:
            return expand(match[0], tokens)
        value = os.environ.get(match[1])
        if value is None:
            raise SshConfigError(f"the environment variable {match[1]!r} in {text!r} is not set")
        return value

    return re.sub(r"\$\{([^}]*)\}|%.?", replacement, tilde(text, home), flags=re.DOTALL)


def tilde(text: str, home: Path) -> str:
    if not text.startswith("~"):
        return text
    user, slash, rest = text[1:].partition("/")
    try:
        return f"{pwd.getpwnam(user).pw_dir if user else home}{slash}{rest}"
    except KeyError:
        raise SshConfigError(f"{text}: there is no user {user}") from None


def jump_spec(spec: str) -> tuple[str | None, str, int | None]:
    """Split ``[user@]host[:port]`` or ``ssh://…``. An IPv6 address needs brackets."""
    match = re.fullmatch(
        r"(?:ssh://)?(?:(?P<user>.+)@)?"
        r"(?:\[(?P<bracketed>[^\[\]]+)\]|(?P<host>[^@:\[\]]+))"
        r"(?::(?P<port>\d{1,5}))?/?",
        spec,
    )
    if not match:
        raise SshConfigError(
            f"{spec!r} is not a jump host: [user@]host[:port], with brackets around an IPv6 address"
        )
    host = match["bracketed"] or match["host"]
    port = int(match["port"]) if match["port"] else None
    if port is not None and not 0 < port < 1 << 16:
        raise SshConfigError(f"the port of jump host {spec!r} is not between 1 and 65535")
    require_safe("jump host", host, HOST)
    require_safe("user name", match["user"], USER)
    return match["user"], host, port


def require_safe(what: str, text: str | None, pattern: re.Pattern[str]) -> None:
    """Raise SshConfigError if ``text`` is unsafe on the command lines of ProxyCommand and ssh."""
    if text is not None and not pattern.fullmatch(text):
        raise SshConfigError(
            f"the {what} {text!r} contains characters that OpenSSH refuses",
            "names cannot start with '-' or contain blanks or any of '`\"$;&<>|(){}",
        )
