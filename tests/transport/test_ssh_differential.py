"""The fallback reader against `ssh -G`, on random configurations."""

from __future__ import annotations

import os
import pwd
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.diagnostics import ConnectError
from dtrain.spec.model import Host, Ssh
from dtrain.transport.endpoint import SYSTEM_CONFIG, Endpoint, Resolver

SEED = int(os.environ.get("DTRAIN_TEST_SEED", "10"))
CONFIGURATIONS, HOSTS_EACH = 125, 8

HOSTS = ["gpu01", "GPU01", "gpu02", "Gpu-a.Example.com", "node7", "10.0.0.1", "fd00::0:1", "b.c.d"]
USERS = ["ml", "root", "Data", "a.b"]
NAMES = ["%h.example.com", "10.0.0.9", "FD00::0009", "Login.Cluster", "gpu01", "%h", "x%%y"]
PATTERNS = ["*", "gpu*", "GPU*", "gpu0?", "!gpu01", "!*.com", "node7", "10.*", "*.example.com"]
FLAGS = ["yes", "no", "Yes", "NO", "true", "False"]
TIMES = ["0", "30", "1m", "10s", "1M30s", "1h", "1d2h"]

Draw = Callable[[random.Random], str]


def one_of(*values: str) -> Draw:
    return lambda draw: draw.choice(values)


flag = one_of(*FLAGS)
HONOURED: dict[str, Draw] = {
    "AddressFamily": one_of("any", "inet", "inet6", "INET", "Inet6"),
    "BatchMode": flag,
    "BindAddress": one_of("127.0.0.1", "::1"),
    "CASignatureAlgorithms": one_of("ssh-ed25519", "rsa-sha2-512,ssh-ed25519"),
    "CertificateFile": one_of("~/c-%h.pub", "/c1", "none", "${HOME}/c"),
    "Ciphers": one_of("aes256-ctr", "aes128-ctr,aes256-gcm@openssh.com", "+aes128-cbc"),
    "Compression": one_of("yes", "no", "Yes"),
    "ConnectTimeout": one_of("none", *TIMES),
    "GlobalKnownHostsFile": one_of("/g1", "/g1 /g2", "none", '"/g1"'),
    "HashKnownHosts": flag,
    "HostKeyAlgorithms": one_of("ssh-ed25519", "ssh-ed25519,rsa-sha2-512", "-ssh-rsa"),
    "HostKeyAlias": one_of("alias", "Alias-%h", "'a.b'"),
    "HostName": one_of(*NAMES),
    "IdentitiesOnly": flag,
    "IdentityAgent": one_of("none", "SSH_AUTH_SOCK", "~/a-%r.sock", "$NOWHERE", "${HOME}/%n"),
    "IdentityFile": one_of("~/k1", "~/keys/%r@%n", "/k-%p", "none", "${HOME}/k", '"/a b"', "~/k1"),
    "KbdInteractiveAuthentication": flag,
    "KexAlgorithms": one_of("curve25519-sha256", "^ecdh-sha2-nistp256"),
    "MACs": one_of("hmac-sha2-256", "hmac-sha2-512,hmac-sha2-256"),
    "Port": one_of("22", "2201", "65535", "ssh"),
    "ProxyCommand": one_of("nc %h %p", "none", "sh -c 'a \"b\" %n' # x", "= relay %r@%h %% %k"),
    "ProxyJump": one_of("gate", "ml@gate:2022", "a@[fd00::1]:22,inner", "none", "ssh://u@w:7"),
    "PubkeyAcceptedAlgorithms": one_of("ssh-ed25519", "rsa-sha2-*"),
    "RequiredRSASize": one_of("2048", "3072"),
    "RevokedHostKeys": one_of("~/revoked", "/r", "none"),
    "ServerAliveCountMax": one_of("0", "3", "7"),
    "ServerAliveInterval": one_of(*TIMES),
    "StrictHostKeyChecking": one_of("yes", "Ask", "no", "off", "accept-new", "True", "false"),
    "User": one_of(*USERS, "$(touch ran)", "-l"),
    "UserKnownHostsFile": one_of("~/u1", "~/u1 /u-%h", "none", "${HOME}/u", "/u-%p-%r-%k"),
}
OTHERS: dict[str, Draw] = {
    "AddKeysToAgent": one_of("yes", "confirm 5m", "1h"),
    "CanonicalizeHostname": one_of("no", "No", "false"),
    "CanonicalizePermittedCNAMEs": one_of("none"),
    "ConnectionAttempts": one_of("3"),
    "ControlMaster": one_of("auto"),
    "ControlPersist": one_of("10m", "no"),
    "DynamicForward": one_of("1080"),
    "EscapeChar": one_of("none"),
    "ForwardAgent": one_of(*FLAGS),
    "ForwardX11": flag,
    "GSSAPIAuthentication": flag,
    "IPQoS": one_of("throughput", "af21 cs1"),
    "LocalCommand": one_of("echo %h"),
    "LocalForward": one_of("8080 localhost:80"),
    "LogLevel": one_of("QUIET", "ERROR"),
    "PreferredAuthentications": one_of("publickey", "keyboard-interactive,publickey"),
    "RequestTTY": one_of("force", "no"),
    "SendEnv": one_of("LANG LC_*"),
    "SetEnv": one_of("A=b C=d"),
    "TCPKeepAlive": flag,
    "UpdateHostKeys": one_of("ask", "no"),
    "VisualHostKey": flag,
}
REFUSED: dict[str, Draw] = {
    "BindInterface": one_of("lo"),
    "CheckHostIP": flag,
    "KnownHostsCommand": one_of("/bin/true %h", "none"),
    "PermitLocalCommand": flag,
    "PKCS11Provider": one_of("/usr/lib/token.so", "none"),
    "PreferredAuthentications": one_of("password", "hostbased,password"),
    "ProxyUseFdpass": flag,
    "PubkeyAuthentication": one_of(*FLAGS, "unbound", "host-bound"),
    "RekeyLimit": one_of("default none", "1G 1h", "100M"),
    "RemoteCommand": one_of("tmux attach", "none"),
    "SessionType": one_of("default", "none"),
    "Tunnel": one_of("no", "yes", "Ethernet"),
}
INVALID = ["Prt 22", "Port 0", "ProxyJump a:0", "Compression maybe", "Port 1 2", 'User "x', "User"]
NEEDS_SSH = ("needs the `ssh` program", "changes OpenSSH's default")


class Writer:
    """Writes one random configuration, with what it includes."""

    def __init__(self, draw: random.Random, folder: Path) -> None:
        self._draw = draw
        self._folder = folder
        self._files = 0

    def write(self, depth: int = 0) -> Path:
        self._files += 1
        path = self._folder / f"{depth}-{self._files}"
        lines = []
        for _ in range(self._draw.randint(2, 5)):
            lines.append(self._block())
            lines += [f"  {self._setting()}" for _ in range(self._draw.randint(0, 4))]
            if depth < 2 and self._draw.random() < 0.15:
                lines.append(f"  Include {self.write(depth + 1)} {self._folder}/nothing*")
        path.write_text("\n".join(lines) + "\n")
        return path

    def _block(self) -> str:
        draw = self._draw
        if draw.random() < 0.5:
            return "Host " + " ".join(draw.sample(PATTERNS, draw.randint(1, 3)))
        if draw.random() < 0.15:
            return draw.choice(["Match all", "Match final all", "Match canonical all", "match ALL"])
        criteria = []
        for name in draw.sample(["host", "originalhost", "user", "localuser"], draw.randint(1, 2)):
            values = [*USERS, "*"] if "user" in name else PATTERNS
            argument = ",".join(draw.sample(values, draw.randint(1, 2)))
            criteria.append(f"{draw.choice(['', '', '!'])}{name} {argument}")
        if draw.random() < 0.2:
            criteria.append(draw.choice(["final", "canonical", "!final", "Final"]))
        if draw.random() < 0.05:
            criteria.append(draw.choice(["exec true", "!exec true", "exec false"]))
        return "Match " + " ".join(criteria) + draw.choice(["", " # comment"])

    def _setting(self) -> str:
        draw = self._draw
        kind = draw.random()
        if kind < 0.004:
            return draw.choice(INVALID)
        options = REFUSED if kind < 0.04 else OTHERS if kind < 0.25 else HONOURED
        keyword = draw.choice(sorted(options))
        written = draw.choice([keyword, keyword, keyword.lower(), keyword.upper()])
        return f"{written}{draw.choice([' ', ' ', '=', ' = ', '  '])}{options[keyword](draw)}"


def outcome(resolver: Resolver, host: Host) -> Endpoint | str:
    try:
        return comparable(resolver.resolve(host))
    except ConnectError as error:
        return error.reason


def comparable(endpoint: Endpoint) -> Endpoint:
    """What does not depend on the version: ssh differs in the key files that it looks for, and
    Debian's sets another interval under BatchMode."""
    return replace(
        endpoint,
        alive_interval=0 if endpoint.batch_mode else endpoint.alive_interval,
        default_identities=endpoint.default_identities[:1],
        via=comparable(endpoint.via) if endpoint.via else None,
    )


def test_the_fallback_reader_finds_what_ssh_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = pwd.getpwuid(os.getuid())
    monkeypatch.setenv("HOME", account.pw_dir)
    monkeypatch.setenv("LOGNAME", account.pw_name)
    draw = random.Random(SEED)
    look_ups = []
    for number in range(CONFIGURATIONS):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = Writer(draw, folder).write()
        for name in draw.sample(HOSTS, HOSTS_EACH):
            ssh = Ssh(
                config=str(config),
                user=draw.choice([None, None, None, *USERS]),
                port=draw.choice([None, None, None, 2222]),
                jump=draw.choice([None] * 6 + ["none", "bastion"]),
            )
            look_ups.append(Host(name, name, ssh=ssh))
    asking = Resolver(tmp_path, SYSTEM_CONFIG, lambda _text: None)
    reading = Resolver(tmp_path, SYSTEM_CONFIG, lambda _text: None, ssh=None)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda host: outcome(asking, host), look_ups))
    found = [outcome(reading, host) for host in look_ups]
    resolved = 0
    for host, expected, actual in zip(look_ups, answers, found, strict=True):
        if isinstance(actual, str) and any(reason in actual for reason in NEEDS_SSH):
            continue
        if isinstance(expected, str) or isinstance(actual, str):
            both = isinstance(expected, str) and isinstance(actual, str)
            assert both, f"{host}\nssh: {expected}\nreader: {actual}"
            continue
        assert actual == expected, host
        resolved += 1
    # Enough of them were neither refused nor left to ssh.
    assert len(look_ups) >= 1000
    assert resolved > len(look_ups) // 3, resolved
