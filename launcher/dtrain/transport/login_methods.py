"""The ways to log in that dtrain has, and which of them ssh's configuration allows."""

from __future__ import annotations

from dtrain.transport.ssh_options import Options, SshConfigError

KEY, TICKET, QUESTIONS = "publickey", "gssapi-with-mic", "keyboard-interactive"
"""The protocol's names of a login with a key, with a Kerberos ticket (GSSAPI), and with answers to
the server's questions."""


def allowed_methods(options: Options) -> frozenset[str]:
    """Raises SshConfigError if neither a key nor a ticket is allowed."""
    found = {KEY, TICKET, QUESTIONS}
    preferred = options.get("preferredauthentications")
    if preferred is not None:
        found &= set(preferred.split(","))
    if not options.flag("gssapiauthentication"):
        found -= {TICKET}
    if not options.flag("kbdinteractiveauthentication", default=True):
        found -= {QUESTIONS}
    if options.choice("pubkeyauthentication", "yes") == "no":
        found -= {KEY}
    if not found & {KEY, TICKET}:
        wanted = preferred is None or KEY in preferred.split(",")
        reason = "PubkeyAuthentication no" if wanted else f"PreferredAuthentications {preferred}"
        raise SshConfigError(
            f"{reason} excludes keys, and Kerberos tickets are not allowed either",
            "allow keys for this host, or set `GSSAPIAuthentication yes`",
        )
    return frozenset(found)
