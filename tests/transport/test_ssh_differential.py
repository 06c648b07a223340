"""Compares dtrain with OpenSSH on random configurations: the options of the fallback reader with
`ssh -G`, and connections with those of `ssh`."""

from __future__ import annotations

import os
import pwd
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.diagnostics import ConnectError, NodeError
from dtrain.spec.model import Host, Ssh
from dtrain.transport.endpoint import SYSTEM_CONFIG, Endpoint, Resolver
from dtrain.transport.ssh import SshTransport
from support.ports import free_port
from support.sshd import Sshd, generate_key

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
NEEDS_SSH = ("needs the `ssh` program", "modifies OpenSSH's default")


class Writer:
    """Writes one random configuration with its included files."""

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
    """The options that do not depend on the version: versions of ssh have different default key
    files, and Debian's sets another interval with BatchMode."""
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
    # Enough configurations were neither refused nor dependent on ssh.
    assert len(look_ups) >= 1000
    assert resolved > len(look_ups) // 3, resolved


CONNECTIONS = 50


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("keys")
    kinds = {"a": "ed25519", "b": "ed25519", "e": "ecdsa", "r": "rsa", "x": "ed25519"}
    made = {name: generate_key(folder / name, kind) for name, kind in kinds.items()}
    made["x"].chmod(0o640)
    return made


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory, keys: dict[str, Path]) -> Iterator[Path]:
    """An agent with one key that is also in a file, and one that is not."""
    path = tmp_path_factory.mktemp("agent") / "socket"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()  # The agent prints its variables when it is ready.
    own = generate_key(path.parent / "own")
    environment = {**os.environ, "SSH_AUTH_SOCK": str(path)}
    subprocess.run(["ssh-add", "-q", str(own), str(keys["e"])], check=True, env=environment)
    yield path
    process.kill()
    process.communicate()


def fingerprint(key: Path) -> str:
    command = ["ssh-keygen", "-l", "-f", f"{key}.pub"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[1]


class ConnectionWriter:
    """Writes configurations for gpu01 on a real server. Each line may be wrong."""

    def __init__(
        self, draw: random.Random, folder: Path, sshd: Sshd, keys: dict[str, Path], agent: Path
    ) -> None:
        self._draw, self._folder, self._agent, self._sshd = draw, folder, agent, sshd
        self._keys = [*keys.values(), sshd.identity, folder / "missing"]
        self._names = self._known_names()
        other = " ".join(Path(f"{keys['a']}.pub").read_text().split()[:2])
        self._revoked = folder / "revoked"
        self._revoked.write_text(f"{sshd.host_key()}\n")
        self._not_revoked = folder / "not-revoked"
        self._not_revoked.write_text(f"{other}\n")
        self._host_keys = [*[sshd.host_key()] * 7, other]
        self._closed = free_port()

    def _known_names(self) -> list[str]:
        port = self._sshd.port
        return [*[f"[127.0.0.1]:{port}"] * 5, "127.0.0.1", "alias,[127.*", "gpu01", "alias,*"]

    def write(self, number: int) -> Path:
        draw, sshd = self._draw, self._sshd
        known = self._folder / f"known{number}"
        line = f"{draw.choice(self._names)} {draw.choice(self._host_keys)}\n"
        known.write_text(line + (f"@revoked * {sshd.host_key()}\n" if draw.random() < 0.1 else ""))
        if draw.random() < 0.2:
            subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
        lines = [
            f"Host GPU01\n  User wrong\nMatch originalhost gpu0? !user wrong\n  Port {sshd.port}"
            if draw.random() < 0.95
            else f"Port {self._closed}",
            "Match all",
            f"HostName {draw.choice([*['127.0.0.1'] * 15, '127.0.0.2'])}",
            f"UserKnownHostsFile {known}",
            "GlobalKnownHostsFile none",
            f"User {draw.choice([*[sshd.user] * 6, 'nobody-here'])}",
            f"IdentitiesOnly {draw.choice(['Yes', 'no'])}",
            f"IdentityAgent {draw.choice(['none', str(self._agent)])}",
            f"StrictHostKeyChecking {draw.choice(['ask', 'True', 'yes'])}",
        ]
        chosen = draw.sample(self._keys, draw.randint(1, 3))
        if draw.random() < 0.6 and sshd.identity not in chosen:
            chosen.insert(draw.randint(0, len(chosen)), sshd.identity)
        lines += [f"IdentityFile {key}" for key in chosen]
        lines += [
            line
            for line in (
                "AddressFamily INET",
                "BindAddress 127.0.0.3",
                "HostKeyAlias Alias",
                "PubkeyAcceptedAlgorithms ssh-ed25519",
                "PubkeyAcceptedAlgorithms -ssh-ed25519",
                "Ciphers aes256-ctr",
                "Compression yes",
                f"RevokedHostKeys {draw.choice([self._revoked, self._not_revoked])}",
            )
            if draw.random() < 0.15
        ]
        path = self._folder / f"config{number}"
        path.write_text("\n".join(lines) + "\n")
        return path


def seen(sshd: Sshd, connect: Callable[[], str]) -> tuple[tuple[str, ...], ...]:
    """The connection as the server sees it: both addresses, the user, the keys in order and
    whether the last one was accepted. If there is no login attempt, the client refused the
    host key. ``connect`` returns the client's message."""
    before = len(sshd.log())
    if "connection refused" in connect().lower():
        return (("no connection",),)
    # Log lines of an earlier connection may still arrive.
    start = rf"(?s)\A.{{{before}}}.*?Connection from \S+ port (\d+) on "
    end = r"(?:Accepted|Connection (?:closed|reset)|[Dd]isconnect)[^\n]* port \1\b[^\n]*"
    log = sshd.wait_for_log(f"{start}.*?{end}")[before:]
    connection = re.search(r"Connection from (\S+) port (\d+) on (\S+) port (\d+)", log)
    assert connection
    client, port, *server = connection.groups()
    tries = rf"(Accepted|Failed) publickey for (.*) from \S+ port {port} .*(SHA256:\S+)"
    return (client, *server), *re.findall(tries, log)


@pytest.mark.sshd
def test_connections_are_those_of_ssh(
    tmp_path: Path,
    sshd: Sshd,
    keys: dict[str, Path],
    agent: Path,
    make_transport: Callable[..., SshTransport],
) -> None:
    writer = ConnectionWriter(random.Random(SEED), tmp_path, sshd, keys, agent)
    transport = make_transport()
    open_to_others = fingerprint(keys["x"])
    outcomes = []
    for number in range(CONNECTIONS):
        config = writer.write(number)

        def by_ssh(config: Path = config) -> str:
            command = ["ssh", "-F", str(config), "-o", "BatchMode=yes", "gpu01", "true"]
            return subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            ).stderr

        def by_dtrain(config: Path = config) -> str:
            try:
                transport.connect(Host("gpu01", "gpu01", ssh=Ssh(config=str(config)))).close()
            except NodeError as error:
                return error.reason
            return ""

        # ssh offers the public key even if it then ignores the private key.
        expected = tuple(part for part in seen(sshd, by_ssh) if open_to_others not in part)
        actual = seen(sshd, by_dtrain)
        assert actual == expected, config.read_text()
        outcomes.append(expected)
    # All outcomes occur: no connection, a refused host key, a refused user, a login.
    lengths = {len(outcome) for outcome in outcomes}
    assert (("no connection",),) in outcomes
    assert 1 in lengths and max(lengths) > 2
    assert sum(outcome[-1][0] == "Accepted" for outcome in outcomes) > CONNECTIONS // 10
