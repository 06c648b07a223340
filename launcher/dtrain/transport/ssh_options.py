"""The options of ssh_config(5): how dtrain treats each option and parses its value.

Every option is in one of four groups:

- `HONOURED`: `endpoint` applies it to the connection.
- `NO_EFFECT`: it does not affect dtrain, for one of `_REASONS`.
- `LEFT_OUT`: dtrain does not support it, and prints a notice if it is set.
- `REFUSED`: dtrain does not support it, and ignoring it would give a connection that the user
  did not ask for. It is an error.

An option in no group is an error if it differs from OpenSSH's default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dtrain.records import dataclass


def _names_in(text: str) -> frozenset[str]:
    return frozenset(text.split())


HONOURED = _names_in(
    """
    AddressFamily BatchMode BindAddress CASignatureAlgorithms CertificateFile Ciphers Compression
    ConnectTimeout ControlPath GlobalKnownHostsFile GSSAPIAuthentication GSSAPIDelegateCredentials
    GSSAPIServerIdentity HashKnownHosts HostbasedAcceptedAlgorithms HostbasedAuthentication
    HostKeyAlgorithms HostKeyAlias HostName IdentitiesOnly IdentityAgent IdentityFile
    KbdInteractiveAuthentication KexAlgorithms MACs Port PreferredAuthentications ProxyCommand
    ProxyJump PubkeyAcceptedAlgorithms PubkeyAuthentication RequiredRSASize RevokedHostKeys
    ServerAliveCountMax ServerAliveInterval StrictHostKeyChecking User UserKnownHostsFile
    """
)

_FORWARDING = "dtrain forwards nothing"

_REASONS: Mapping[str, str] = {
    "dtrain sends no passwords, and answers any questions of the server if it requires that": """
        KbdInteractiveDevices PasswordAuthentication
    """,
    "ssh-keysign itself reads it": "EnableSSHKeysign",
    "dtrain uses Kerberos only to log in, and exchanges keys without it": """
        GSSAPIKexAlgorithms GSSAPIKeyExchange GSSAPIRenewalForcesRekey
    """,
    "krb5.conf says how Kerberos uses DNS": "GSSAPITrustDNS",
    _FORWARDING: """
        ChannelTimeout ClearAllForwardings ExitOnForwardFailure ForwardX11Timeout ForwardX11Trusted
        GatewayPorts PermitRemoteOpen StreamLocalBindMask StreamLocalBindUnlink XAuthLocation
    """,
    "it applies only to the output of ssh itself": """
        FingerprintHash LogLevel LogVerbose SyslogFacility VisualHostKey WarnWeakCrypto
    """,
    "`ssh -G` has applied it to the host's name": """
        CanonicalDomains CanonicalizeFallbackLocal CanonicalizeHostname CanonicalizeMaxDots
        CanonicalizePermittedCNAMEs
    """,
    "it applies only to interactive sessions": """
        EnableEscapeCommandline EscapeChar ForkAfterAuthentication ObscureKeystrokeTiming StdinNull
    """,
    "dtrain uses an existing master for a jump host (ControlPath) but starts none": """
        ControlMaster ControlPersist
    """,
    "dtrain's host key checks are at least as strict without it": """
        NoHostAuthenticationForLocalhost VerifyHostKeyDNS
    """,
    "PermitLocalCommand decides": "LocalCommand",
    "Tunnel decides": "TunnelDevice",
    "dtrain adds no keys to the agent": "AddKeysToAgent",
    "dtrain asks for a passphrase three times": "NumberOfPasswordPrompts",
    "dtrain composes the whole environment of a worker": "SendEnv",
    "dtrain has its own rules for retries": "ConnectionAttempts",
    "dtrain records only keys that it has checked": "UpdateHostKeys",
    "dtrain sends keepalive requests on every connection": "TCPKeepAlive",
    "dtrain uses FIDO keys through the agent only": "SecurityKeyProvider",
    "dtrain's commands use no terminal": "RequestTTY",
    "it is a comment in the protocol": "VersionAddendum",
    "it is the name itself": "Host",
    "it marks packets, but changes neither the route nor the peer": "IPQoS",
    "it selects blocks only": "Tag",
    "ssh has applied it": "IgnoreUnknown",
    "OpenSSH itself ignores it": """
        AFSTokenPassing Cipher CompressionLevel FallBackToRsh GlobalKnownHostsFile2
        KerberosAuthentication KerberosTGTPassing Protocol RhostsAuthentication
        RhostsRSAAuthentication RSAAuthentication SmartcardDevice UseKeychain UsePrivilegedPort
        UserKnownHostsFile2 UseRoaming UseRsh
    """,
}
"""The options of `NO_EFFECT`, by the reason."""
NO_EFFECT = _names_in(" ".join(_REASONS.values()))

LEFT_OUT: Mapping[str, str] = {
    "DynamicForward": _FORWARDING,
    "ForwardAgent": "dtrain forwards no agent: nodes cannot use your keys",
    "ForwardX11": _FORWARDING,
    "GSSAPIClientIdentity": "dtrain uses the default ticket: choose another with KRB5CCNAME",
    "LocalForward": _FORWARDING,
    "RemoteForward": _FORWARDING,
    "SetEnv": "set the environment of workers as `env` in the cluster file",
}


@dataclass(frozen=True, slots=True)
class RefusedValues:
    accepted: tuple[str, ...]
    """Values that dtrain's connections satisfy, in addition to OpenSSH's default."""
    hint: str
    needs: str = ""
    """The refused option has no effect unless this one is set."""


REFUSED: Mapping[str, RefusedValues] = {
    "BindInterface": RefusedValues((), "give the interface's address as BindAddress instead"),
    "CheckHostIP": RefusedValues(("no",), "set `CheckHostIP no` for this host"),
    "KnownHostsCommand": RefusedValues(
        ("none",), "put the keys in a file: `known_hosts` under `ssh`"
    ),
    "PermitLocalCommand": RefusedValues(
        ("no",), "set `PermitLocalCommand no` for this host", "localcommand"
    ),
    "PKCS11Provider": RefusedValues(("none",), "load the token's keys into the agent: ssh-add -s"),
    "ProxyUseFdpass": RefusedValues(
        ("no",), "use a ProxyCommand that relays data, or ProxyJump", "proxycommand"
    ),
    "RefuseConnection": RefusedValues((), "ssh refuses this host as well"),
    "RekeyLimit": RefusedValues(
        ("default", "default none", "0 0", "0"),
        "paramiko renews keys after every 512 MiB: set `RekeyLimit default none` for this host",
    ),
    "RemoteCommand": RefusedValues(("none",), "set `RemoteCommand none` for this host"),
    "SessionType": RefusedValues(("default",), "dtrain runs commands: set `SessionType default`"),
    "Tunnel": RefusedValues(("no",), "set `Tunnel no` for this host"),
}

ALIASES: Mapping[str, str] = {
    "challengeresponseauthentication": "kbdinteractiveauthentication",
    "dsaauthentication": "pubkeyauthentication",
    "hostbasedkeytypes": "hostbasedacceptedalgorithms",
    "identityfile2": "identityfile",
    "keepalive": "tcpkeepalive",
    "pubkeyacceptedkeytypes": "pubkeyacceptedalgorithms",
    "skeyauthentication": "kbdinteractiveauthentication",
    "smartcarddevice": "pkcs11provider",
    "tisauthentication": "kbdinteractiveauthentication",
}
"""Older names. OpenSSH before 8.5 prints them too."""


class SshConfigError(Exception):
    """An ssh configuration that is unreadable or unsupported. ``hint`` contains the remedy."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one host as `ssh -G` prints them. Keywords are in lower case."""

    values: Mapping[str, tuple[str, ...]]
    defaults: Mapping[str, tuple[str, ...]]
    """The values without any configuration, from the same source."""

    def get(self, keyword: str) -> str | None:
        """The first value, or None."""
        found = self.values.get(keyword)
        return found[0] if found else None

    def all(self, keyword: str) -> tuple[str, ...]:
        return self.values.get(keyword, ())

    def configured(self, keyword: str) -> bool:
        return self.all(keyword) != self.defaults.get(keyword, ())

    def flag(self, keyword: str, *, default: bool = False) -> bool:
        value = self.get(keyword)
        if value is None:
            return default
        choice = _normal(value)
        if choice not in {"yes", "no"}:
            raise SshConfigError(f"{_name(keyword)} {value!r} is neither yes nor no")
        return choice == "yes"

    def number(self, keyword: str, default: int, low: int = 0) -> int:
        value = self.get(keyword)
        if value is None:
            return default
        if not re.fullmatch(r"[0-9]{1,10}", value):
            raise SshConfigError(f"{_name(keyword)} {value!r} is not a number")
        if int(value) < low:
            raise SshConfigError(f"{_name(keyword)} {value!r} is too small")
        return int(value)

    def seconds(self, keyword: str) -> int:
        """A time such as ``90``, ``1m`` or ``1h30m``, in seconds; 0 if there is no limit."""
        value = self.get(keyword)
        return 0 if value is None or value == "none" else seconds(keyword, value)

    def choice(self, keyword: str, default: str) -> str:
        """A value in lower case, with ``yes`` for ``true``."""
        return _normal(self.get(keyword) or default)

    def names(self, keyword: str) -> tuple[str, ...] | None:
        """A list of algorithms; None for OpenSSH's default."""
        value = self.get(keyword)
        if value is None or not self.configured(keyword):
            return None
        return tuple(value.split(","))


def check(options: Options) -> Iterator[str]:
    """Yield a notice for each option that dtrain ignores.

    Raises SshConfigError for an option that is unknown or refused.
    """
    for keyword, lines in options.values.items():
        name = NAMES.get(keyword)
        if name in HONOURED or name in NO_EFFECT or not options.configured(keyword):
            continue
        value = " ".join(lines)
        if name is None:
            raise SshConfigError(
                f"dtrain does not know the option {keyword!r} ({value})", "remove it for this host"
            )
        if name in LEFT_OUT:
            if _normal(value) not in {"no", "none"}:
                yield f"{name} in ssh's configuration has no effect: {LEFT_OUT[name]}"
        elif _normal(value) not in REFUSED[name].accepted:
            needed = REFUSED[name].needs
            if not needed or (options.get(needed) or "none").lower() != "none":
                raise SshConfigError(f"dtrain does not support {name} {value}", REFUSED[name].hint)


def seconds(keyword: str, value: str) -> int:
    """Parse a time in OpenSSH's format: numbers with the units s, m, h, d and w."""
    parts = re.findall(r"([0-9]{1,10})([smhdw]?)", value.lower())
    if not parts or "".join(number + unit for number, unit in parts) != value.lower():
        raise SshConfigError(f"{_name(keyword)} {value!r} is not a time such as 30 or 1m30s")
    total = sum(int(number) * _UNITS[unit] for number, unit in parts)
    if total >= 1 << 31:
        raise SshConfigError(f"{_name(keyword)} {value!r} is too long")
    return total


def _name(keyword: str) -> str:
    return NAMES.get(keyword) or keyword


def _normal(value: str) -> str:
    lower = value.lower()
    return {"true": "yes", "false": "no"}.get(lower, lower)


_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
NAMES = {name.lower(): name for name in (*HONOURED, *NO_EFFECT, *LEFT_OUT, *REFUSED)}
"""The options of all groups, by keyword."""
