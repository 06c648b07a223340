"""The ways to log in that dtrain has, and which of them ssh's configuration allows."""

from __future__ import annotations

from dtrain.transport.ssh_options import Options, SshConfigError

KEY, TICKET, HOST = "publickey", "gssapi-with-mic", "hostbased"
QUESTIONS = "keyboard-interactive"
"""The protocol's names of a login with a key, with a Kerberos ticket (GSSAPI), with the host key of
this machine, and with answers to the server's questions."""
_ORDER = (TICKET, HOST, KEY, QUESTIONS)
"""ssh's own."""


class LoginMethodError(Exception):
    """A method does not log in, for the reason in the message. ``hint``: what the user can do, if
    that is clear."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.hint = hint


def allowed_methods(options: Options) -> tuple[str, ...]:
    """In the order in which ssh uses them. Raises SshConfigError if the only one is to answer
    questions."""
    preferred = options.get("preferredauthentications")
    allowed = {
        TICKET: options.flag("gssapiauthentication"),
        HOST: options.flag("hostbasedauthentication"),
        KEY: options.choice("pubkeyauthentication", "yes") != "no",
        QUESTIONS: options.flag("kbdinteractiveauthentication", default=True),
    }
    order = _ORDER if preferred is None else preferred.split(",")
    found = tuple(dict.fromkeys(method for method in order if allowed.get(method)))
    if not {*found} - {QUESTIONS}:
        wanted = preferred is None or KEY in preferred.split(",")
        reason = "PubkeyAuthentication no" if wanted else f"PreferredAuthentications {preferred}"
        raise SshConfigError(
            f"{reason} excludes keys, and neither Kerberos tickets nor host-based logins are "
            "allowed",
            "allow keys for this host, or set `GSSAPIAuthentication yes` or "
            "`HostbasedAuthentication yes`",
        )
    return found
