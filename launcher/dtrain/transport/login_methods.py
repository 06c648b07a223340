"""The ways to log in that dtrain has, and which of them ssh's configuration allows."""

from __future__ import annotations

from dtrain.transport.ssh_options import Options, SshConfigError

KEY, TICKET, HOST = "publickey", "gssapi-with-mic", "hostbased"
QUESTIONS = "keyboard-interactive"
"""The protocol's names of a login with a key, with a Kerberos ticket (GSSAPI), with the host key of
this machine, and with answers to the server's questions."""


class LoginMethodError(Exception):
    """A method does not log in, for the reason in the message. ``hint``: what the user can do, if
    that is clear."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.hint = hint


def allowed_methods(options: Options) -> frozenset[str]:
    """Raises SshConfigError if the only one is to answer questions."""
    found = {KEY, TICKET, HOST, QUESTIONS}
    preferred = options.get("preferredauthentications")
    if preferred is not None:
        found &= set(preferred.split(","))
    if not options.flag("gssapiauthentication"):
        found -= {TICKET}
    if not options.flag("hostbasedauthentication"):
        found -= {HOST}
    if not options.flag("kbdinteractiveauthentication", default=True):
        found -= {QUESTIONS}
    if options.choice("pubkeyauthentication", "yes") == "no":
        found -= {KEY}
    if not found - {QUESTIONS}:
        wanted = preferred is None or KEY in preferred.split(",")
        reason = "PubkeyAuthentication no" if wanted else f"PreferredAuthentications {preferred}"
        raise SshConfigError(
            f"{reason} excludes keys, and neither Kerberos tickets nor host-based logins are "
            "allowed",
            "allow keys for this host, or set `GSSAPIAuthentication yes` or "
            "`HostbasedAuthentication yes`",
        )
    return frozenset(found)
