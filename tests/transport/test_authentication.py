"""Authentication with a real sshd: offered keys, passphrases, the agent, refusals."""

from __future__ import annotations

import base64
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import paramiko
import pytest

from dtrain.diagnostics import AuthError
from dtrain.spec.model import Host, Ssh
from dtrain.transport import authentication, keys
from dtrain.transport.keys import Keyring
from dtrain.transport.login_handler import LoginHandler
from dtrain.transport.ssh import SshTransport
from support.limits import HANG, until
from support.ssh_server import Login, SshServer
from support.sshd import Sshd, generate_key, host_on, running_sshd

pytestmark = pytest.mark.sshd

SECRET = "correct horse: battery ' staple"  # noqa: S105 (no secret)


@pytest.fixture
def start_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Callable[..., None]]]:
    """Starts a real ssh-agent, with the program that confirms signatures, in place of an earlier
    one. Returns a function that adds a key to it, with options of ssh-add."""
    started: list[subprocess.Popen[bytes]] = []

    def end() -> None:
        for process in started:
            process.send_signal(signal.SIGKILL)
            assert process.stdout
            process.stdout.close()
            process.wait()
        started.clear()

    def start(confirm: str) -> Callable[..., None]:
        end()
        path = tmp_path / "agent.sock"
        path.unlink(missing_ok=True)
        process = subprocess.Popen(
            ["ssh-agent", "-D", "-a", str(path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "SSH_ASKPASS": confirm, "SSH_ASKPASS_REQUIRE": "force"},
        )
        started.append(process)
        assert process.stdout
        process.stdout.readline()  # The agent prints its variables when it is ready.
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))

        def add(key: Path, *options: str) -> None:
            command = ["ssh-add", "-q", *options, str(key)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

        return add

    yield start
    end()


@pytest.fixture
def agent(start_agent: Callable[..., Callable[..., None]]) -> Callable[..., None]:
    """A real ssh-agent. Call it with a key file to add that key."""
    return start_agent("/bin/false")


def fingerprint(key: Path) -> str:
    command = ["ssh-keygen", "-l", "-f", f"{key}.pub"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[1]


@pytest.fixture
def allow(sshd: Sshd) -> Iterator[Callable[[Path], None]]:
    """Authorizes a key on the shared server, for one test."""
    before = sshd.authorized_keys.read_text()
    yield lambda key: sshd.authorized_keys.write_text(before + Path(f"{key}.pub").read_text())
    sshd.authorized_keys.write_text(before)


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_default_key_files_are_found(
    transport: SshTransport, sshd: Sshd, home: Path, allow: Callable[[Path], None], kind: str
) -> None:
    allow(generate_key(home / ".ssh" / f"id_{kind}", kind))
    transport.connect(host_on(sshd, identity=None)).close()


def test_identity_files_of_the_configuration_are_tried_in_order(
    transport: SshTransport, sshd: Sshd, home: Path
) -> None:
    generate_key(home / "wrong")
    config = f"IdentityFile ~/wrong\nIdentityFile ~/missing\nIdentityFile {sshd.identity}\n"
    (home / ".ssh" / "config").write_text(config)
    transport.connect(host_on(sshd, identity=None)).close()


@pytest.mark.parametrize("kind", ["ed25519", "rsa"])
def test_agent_keys_are_used(
    transport: SshTransport,
    sshd: Sshd,
    tmp_path: Path,
    agent: Callable[[Path], None],
    allow: Callable[[Path], None],
    kind: str,
) -> None:
    key = generate_key(tmp_path / "key", kind)
    allow(key)
    agent(key)
    key.unlink()
    hosts = [host_on(sshd, f"gpu{n:02}", identity=None) for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for connection in pool.map(transport.connect, hosts):
            connection.close()


def test_a_public_identity_file_selects_a_key_of_the_agent(
    transport: SshTransport,
    sshd: Sshd,
    tmp_path: Path,
    agent: Callable[[Path], None],
    allow: Callable[[Path], None],
) -> None:
    for number in range(12):
        # More wrong keys than sshd allows: MaxAuthTries 6, and since OpenSSH 10.6 another 6.
        agent(generate_key(tmp_path / f"wrong{number}"))
    key = generate_key(tmp_path / "key")
    allow(key)
    agent(key)
    key.unlink()
    transport.connect(host_on(sshd, identity=str(key))).close()


def test_the_configured_key_comes_before_many_agent_keys(
    transport: SshTransport, sshd: Sshd, tmp_path: Path, agent: Callable[[Path], None]
) -> None:
    for number in range(13):
        agent(generate_key(tmp_path / f"wrong{number}"))
    transport.connect(host_on(sshd)).close()


def test_too_many_wrong_agent_keys_are_explained(
    transport: SshTransport, sshd: Sshd, tmp_path: Path, agent: Callable[[Path], None]
) -> None:
    for number in range(13):
        agent(generate_key(tmp_path / f"wrong{number}", comment=f"key number {number}"))
    # OpenSSH 10.6 does not count the first 6.
    with pytest.raises(AuthError, match=r"it closed the connection after (6|12) ") as caught:
        transport.connect(host_on(sshd, identity=None))
    assert "agent key 'key number 0' (SHA256:" in caught.value.reason
    assert "`identity`" in caught.value.hint


def test_identities_only_ignores_the_agent(
    transport: SshTransport,
    sshd: Sshd,
    tmp_path: Path,
    home: Path,
    agent: Callable[[Path], None],
    allow: Callable[[Path], None],
) -> None:
    key = generate_key(tmp_path / "key")
    allow(key)
    agent(key)
    (home / ".ssh" / "config").write_text("IdentitiesOnly yes\n")
    wrong = generate_key(home / "wrong")
    with pytest.raises(AuthError) as caught:
        transport.connect(host_on(sshd, identity=str(wrong)))
    assert "agent key" not in caught.value.reason


def test_a_dead_agent_is_ignored(
    transport: SshTransport, sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "nobody"))
    transport.connect(host_on(sshd)).close()


def test_the_end_of_a_launch_does_not_wait_for_an_agent(tmp_path: Path) -> None:
    path, left_out, keyring = str(tmp_path / "agent"), list[str](), Keyring(None)
    asking = threading.Thread(target=keyring._agent, args=(path, left_out), daemon=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        asking.start()
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1 << 10)
            keyring.close()
            assert asking.is_alive()
    asking.join(HANG)
    assert left_out == [f"the ssh agent at {path} does not answer"]


def test_an_agent_that_has_restarted_signs_the_next_login(
    transport: SshTransport,
    sshd: Sshd,
    home: Path,
    start_agent: Callable[..., Callable[..., None]],
    allow: Callable[[Path], None],
) -> None:
    key = generate_key(home / "key")
    allow(key)
    for _ in range(2):
        start_agent("/bin/false")(key)
        transport.connect(host_on(sshd, identity=None)).close()


def test_an_agent_that_declines_does_not_end_the_connection(
    transport: SshTransport,
    sshd: Sshd,
    home: Path,
    agent: Callable[[Path], None],
    allow: Callable[[Path], None],
) -> None:
    # The agent lists the key, but its confirmation program declines to sign.
    key = generate_key(home / "confirm")
    allow(key)
    agent(key, "-c")
    with pytest.raises(AuthError, match=r"agent key .*: the agent did not sign") as caught:
        transport.connect(host_on(sshd, identity=None))
    assert caught.value.asked
    assert caught.value.hint.startswith("confirm the login when the agent asks")


def confirming(folder: Path, then: str) -> tuple[str, Callable[[], int]]:
    """A program that confirms signatures, and how often it was asked. ``then``: its last words."""
    program, asked = folder / "askpass", folder / "asked"
    program.write_text(f"#!/bin/sh\necho >> {asked}\n{then}\n")
    program.chmod(0o755)
    return str(program), lambda: asked.read_text().count("\n")


@pytest.fixture
def after_an_hour(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Moves the clock of logins on by an hour."""
    moved = threading.Event()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600.0 * moved.is_set())
    monkeypatch.setattr(authentication, "time", clock)
    return moved.set


def test_the_agent_asks_only_for_the_key_that_the_server_accepts(
    transport: SshTransport,
    sshd: Sshd,
    tmp_path: Path,
    start_agent: Callable[..., Callable[..., None]],
    allow: Callable[[Path], None],
) -> None:
    program, asked = confirming(tmp_path, "exit 0")
    add = start_agent(program)
    keys = [generate_key(tmp_path / f"key{number}") for number in range(3)]
    for key in keys:
        add(key, "-c")
    allow(keys[2])
    transport.connect(host_on(sshd, identity=None)).close()
    assert asked() == 1


def test_the_time_to_confirm_a_login_does_not_count(
    transport: SshTransport,
    sshd: Sshd,
    tmp_path: Path,
    start_agent: Callable[..., Callable[..., None]],
    allow: Callable[[Path], None],
    after_an_hour: Callable[[], None],
) -> None:
    wait = f"until [ -e {tmp_path}/back ]; do sleep 0.05; done"
    program, asked = confirming(tmp_path, f"{wait}; exit 1")
    add = start_agent(program)
    declined, sshd_key = generate_key(tmp_path / "key"), sshd.identity
    allow(declined)
    add(declined, "-c")
    add(sshd_key)
    with ThreadPoolExecutor(1) as pool:
        login = pool.submit(transport.connect, host_on(sshd, identity=None))
        until((tmp_path / "asked").exists)
        after_an_hour()
        (tmp_path / "back").touch()
        login.result(HANG).close()
    assert asked() == 1


def test_a_confirmation_that_comes_too_late_does_not_count_for_the_next_login(
    transport: SshTransport,
    sshd: Sshd,
    tmp_path: Path,
    start_agent: Callable[..., Callable[..., None]],
    allow: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keys, "AGENT_TIMEOUT", 1.0)
    program, asked = confirming(tmp_path, f"until [ -e {tmp_path}/back ]; do sleep 0.05; done")
    add = start_agent(program)
    key = generate_key(tmp_path / "key")
    allow(key)
    add(key, "-c")
    with pytest.raises(AuthError, match="the agent did not sign"):
        transport.connect(host_on(sshd, identity=None))
    (tmp_path / "back").touch()
    transport.connect(host_on(sshd, identity=None)).close()
    assert asked() == 2


def test_a_server_that_hangs_up_while_the_user_confirms_asks_once(
    transport: SshTransport,
    tmp_path: Path,
    start_agent: Callable[..., Callable[..., None]],
    monkeypatch: pytest.MonkeyPatch,
    after_an_hour: Callable[[], None],
) -> None:
    """As if its LoginGraceTime is over."""
    monkeypatch.setattr(authentication, "CONFIRM_SECONDS", 600.0)
    program, asked = confirming(tmp_path, f"until [ -e {tmp_path}/back ]; do sleep 0.05; done")
    add = start_agent(program)
    with running_sshd(tmp_path) as sshd, ThreadPoolExecutor(1) as pool:
        add(sshd.identity, "-c")
        login = pool.submit(transport.connect, host_on(sshd, identity=None))
        until((tmp_path / "asked").exists)
        (connection,) = transport._unfinished
        sshd.end_sessions()
        until(lambda: not connection.is_active())
        after_an_hour()
        (tmp_path / "back").touch()
        with pytest.raises(AuthError, match=r"it accepted .* but closed the connection"):
            login.result(HANG)
    assert asked() == 1


class Observed(Login):
    """Says when a client has offered a key."""

    offered = threading.Event()

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self.offered.set()
        return super().check_auth_publickey(username, key)


def test_a_host_whose_server_hangs_up_while_another_is_confirmed_is_tried_again(
    transport: SshTransport,
    sshd: Sshd,
    tmp_path: Path,
    start_agent: Callable[..., Callable[..., None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent serves one login at a time, and the next one outlasts its LoginGraceTime."""
    monkeypatch.setattr(authentication, "CONFIRM_SECONDS", 0.0)
    program, asked = confirming(tmp_path, f"until [ -e {tmp_path}/back ]; do sleep 0.05; done")
    start_agent(program)(sshd.identity, "-c")
    blob = base64.b64decode(Path(f"{sshd.identity}.pub").read_text().split()[1])
    with SshServer(blob) as server, ThreadPoolExecutor(2) as pool:
        server.login = Observed
        (tmp_path / "known").write_text(server.host_key_line)
        ssh = Ssh("ml", server.port, known_hosts=str(tmp_path / "known"))
        first = pool.submit(transport.connect, host_on(sshd, identity=None))
        until((tmp_path / "asked").exists)
        second = pool.submit(transport.connect, Host("gpu02", "127.0.0.1", ssh=ssh))
        assert Observed.offered.wait(HANG)
        logins = transport._unfinished
        until(lambda: all(type(each.auth_handler) is LoginHandler for each in [*logins]))
        server.drop_connections()
        until(lambda: not all(each.is_active() for each in [*logins]))
        (tmp_path / "back").touch()
        for login in (first, second):
            login.result(HANG).close()
        assert server.connections == 2
    assert asked() == 2


class Denying(Login):
    """Hangs up once the user has proved to own an accepted key, as sshd does if PAM denies the
    account."""

    def __init__(self, server: SshServer) -> None:
        super().__init__(server)
        self.queried = False

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        if self.queried:
            self.server.drop_connections()
        self.queried = True
        return super().check_auth_publickey(username, key)


def test_a_confirmed_login_that_ends_is_not_repeated(
    transport: SshTransport,
    tmp_path: Path,
    agent: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the agent would ask again with each retry."""
    monkeypatch.setattr(authentication, "CONFIRM_SECONDS", 0.0)
    key = generate_key(tmp_path / "key")
    agent(key)
    blob = base64.b64decode(Path(f"{key}.pub").read_text().split()[1])
    with SshServer(blob) as server:
        server.login = Denying
        (tmp_path / "known").write_text(server.host_key_line)
        ssh = Ssh("ml", server.port, known_hosts=str(tmp_path / "known"))
        with pytest.raises(AuthError, match="it accepted agent key") as caught:
            transport.connect(Host("gpu01", "127.0.0.1", ssh=ssh))
        assert caught.value.asked
        assert server.connections == 1


@pytest.mark.parametrize("kind", ["ed25519", "rsa", "pem"])
def test_a_passphrase_is_asked_once_for_eight_hosts(
    make_transport: Callable[..., SshTransport],
    sshd: Sshd,
    tmp_path: Path,
    allow: Callable[[Path], None],
    kind: str,
) -> None:
    key = generate_key(tmp_path / "key", kind.replace("pem", "rsa"), passphrase=SECRET)
    if kind == "pem":
        command = ["ssh-keygen", "-q", "-p", "-m", "PEM", "-P", SECRET, "-N", SECRET]
        subprocess.run([*command, "-f", str(key)], check=True, stdout=subprocess.DEVNULL)
    allow(key)
    prompts: list[str] = []

    def ask(prompt: str, **_options: object) -> str:
        prompts.append(prompt)
        return SECRET

    transport = make_transport(ask=ask)
    hosts = [host_on(sshd, f"gpu{n:02}", identity=str(key)) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for connection in pool.map(transport.connect, hosts):
            connection.close()
    assert prompts == [f"Passphrase for {key}: "]


def test_no_passphrase_prompt_for_a_key_that_the_server_would_refuse(
    make_transport: Callable[..., SshTransport], sshd: Sshd, tmp_path: Path, home: Path
) -> None:
    wrong = generate_key(tmp_path / "wrong", passphrase=SECRET)
    config = f"IdentityFile {wrong}\nIdentityFile {sshd.identity}\n"
    (home / ".ssh" / "config").write_text(config)

    def ask(prompt: str, **_options: object) -> str:
        raise AssertionError(prompt)

    make_transport(ask=ask).connect(host_on(sshd, identity=None)).close()


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (["no", "nope", "never"], "3 passphrases were wrong"),
        ([None], "the user gave no passphrase"),
    ],
)
def test_a_missing_passphrase_counts_for_every_host(
    make_transport: Callable[..., SshTransport],
    sshd: Sshd,
    tmp_path: Path,
    allow: Callable[[Path], None],
    answers: list[str | None],
    reason: str,
) -> None:
    key = generate_key(tmp_path / "key", passphrase=SECRET)
    allow(key)
    left = list(answers)
    transport = make_transport(ask=lambda _prompt, **_options: left.pop(0))
    for name in ("gpu01", "gpu02"):
        with pytest.raises(AuthError) as caught:
            transport.connect(host_on(sshd, name, identity=str(key)))
        assert reason in caught.value.reason
        assert "ssh-add" in caught.value.hint
        assert "nope" not in str(caught.value.__dict__) + str(caught.value.__context__)
    assert not left


def test_a_wrong_passphrase_can_be_corrected(
    make_transport: Callable[..., SshTransport],
    sshd: Sshd,
    tmp_path: Path,
    allow: Callable[[Path], None],
) -> None:
    key = generate_key(tmp_path / "key", passphrase=SECRET)
    allow(key)
    answers = ["typo", SECRET]
    transport = make_transport(ask=lambda _prompt, **_options: answers.pop(0))
    transport.connect(host_on(sshd, identity=str(key))).close()


def test_a_question_that_is_open_at_the_end_is_withdrawn(
    make_transport: Callable[..., SshTransport],
    sshd: Sshd,
    tmp_path: Path,
    allow: Callable[[Path], None],
) -> None:
    """When `close` returns, the terminal is as before."""
    key = generate_key(tmp_path / "key", passphrase=SECRET)
    allow(key)
    asked, states = threading.Event(), []

    def ask(_prompt: str, *, unwanted: Callable[[], bool], **_options: object) -> None:
        states.append("asks")
        asked.set()
        until(unwanted)
        states.append("as before")

    transport = make_transport(ask=ask)
    transport.connect_early([host_on(sshd, name, identity=str(key)) for name in ("a", "b")])
    assert asked.wait(HANG)
    transport.close()
    assert states == ["asks", "as before"]


def test_an_encrypted_key_without_a_terminal(
    transport: SshTransport, sshd: Sshd, tmp_path: Path, allow: Callable[[Path], None]
) -> None:
    key = generate_key(tmp_path / "key", passphrase=SECRET)
    allow(key)
    with pytest.raises(AuthError, match="no key to offer") as caught:
        transport.connect(host_on(sshd, identity=str(key)))
    assert f"{key} ({fingerprint(key)}): encrypted, and dtrain cannot ask" in caught.value.reason
    # `ssh-add` alone loads only the keys with default names.
    load = f"load the key with `ssh-add {key}`"
    assert caught.value.hint == f"{load}, or run dtrain in a terminal"


def test_an_encrypted_key_that_the_agent_holds(
    transport: SshTransport,
    sshd: Sshd,
    tmp_path: Path,
    allow: Callable[[Path], None],
    agent: Callable[[Path], None],
) -> None:
    key = generate_key(tmp_path / "key")
    allow(key)
    agent(key)
    command = ["ssh-keygen", "-q", "-p", "-P", "", "-N", SECRET, "-f", str(key)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    transport.connect(host_on(sshd, identity=str(key))).close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sshd, Path]]:
    """A CA, and a server that trusts the CA instead of keys."""
    folder = tmp_path_factory.mktemp("authority")
    ca = generate_key(folder / "ca")
    with running_sshd(folder, settings={"TrustedUserCAKeys": f"{ca}.pub"}) as sshd:
        yield sshd, ca


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
@pytest.mark.parametrize(
    "where", ["beside the key", "CertificateFile", "agent", "agent, beside", "agent, named"]
)
def test_certificates(
    transport: SshTransport,
    authority: tuple[Sshd, Path],
    tmp_path: Path,
    home: Path,
    agent: Callable[[Path], None],
    where: str,
    kind: str,
) -> None:
    sshd, ca = authority
    key = generate_key(tmp_path / "key", kind)
    if where in {"agent, beside", "agent, named"}:
        agent(key)  # Without its certificate, which is created below.
    name = f"{kind}, {where}"
    sign = ["ssh-keygen", "-q", "-s", str(ca), "-I", name, "-n", sshd.user, f"{key}.pub"]
    subprocess.run(sign, check=True)
    identity: str | None = str(key)
    if where == "agent":
        agent(key)
        identity = None
    if where == "agent, beside":
        key.unlink()
    if where in {"CertificateFile", "agent, named"}:
        moved = Path(f"{key}-cert.pub").rename(tmp_path / "certificate")
        (home / ".ssh" / "config").write_text(f"CertificateFile {moved}\n")
    if where == "agent, named":
        identity = None
    transport.connect(host_on(sshd, identity=identity)).close()
    sshd.wait_for_log(rf'Accepted certificate ID "{name}" \(serial 0\) signed by ED25519')


def test_the_plain_key_is_used_if_the_certificate_has_expired(
    transport: SshTransport, sshd: Sshd, tmp_path: Path, allow: Callable[[Path], None]
) -> None:
    key, authority = generate_key(tmp_path / "key"), generate_key(tmp_path / "authority")
    allow(key)
    command = ["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-V", "-2d:-1d", f"{key}.pub"]
    subprocess.run(command, check=True)
    transport.connect(host_on(sshd, identity=str(key))).close()


def test_refused_keys_are_listed_with_a_remedy(
    transport: SshTransport, sshd: Sshd, home: Path
) -> None:
    one, two = generate_key(home / "one"), generate_key(home / "two")
    open_to_others = generate_key(home / "open")
    open_to_others.chmod(0o644)
    files = (one, two, open_to_others, home / "gone")
    config = "".join(f"IdentityFile {file}\n" for file in files)
    (home / ".ssh" / "config").write_text(config)
    with pytest.raises(AuthError) as caught:
        transport.connect(host_on(sshd, identity=None))
    error = caught.value
    assert error.message.startswith(
        f"gpu01: connecting to gpu01 (127.0.0.1:{sshd.port}) as {sshd.user}: it refused every key: "
        f"{one} ({fingerprint(one)}); {two} ({fingerprint(two)}) "
        f"(not tried: {open_to_others}: its mode 0644 gives other users access: "
        f"chmod 600 {open_to_others}; {home}/gone: no such"
    )
    assert f"-p {sshd.port} {sshd.user}@127.0.0.1`" in error.hint
    assert f"`ssh-copy-id -i {one} " in error.hint
    assert "ssh-add" in error.hint


def test_no_key(transport: SshTransport, sshd: Sshd) -> None:
    with pytest.raises(AuthError, match="no key to offer") as caught:
        transport.connect(host_on(sshd, identity=None))
    assert "ssh-keygen" in caught.value.hint


def test_an_identity_file_that_is_not_a_key(
    transport: SshTransport, sshd: Sshd, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("my diary")
    for name, why in (("key", "not a private key"), ("nope", "no such file")):
        with pytest.raises(AuthError, match=f"{name}: {why}") as caught:
            transport.connect(host_on(sshd, identity=name))
        assert caught.value.hint.startswith("correct `identity` under `ssh` in the cluster file")


def test_a_server_that_accepts_only_passwords(transport: SshTransport, tmp_path: Path) -> None:
    settings = {"PubkeyAuthentication": "no", "PasswordAuthentication": "yes"}
    with (
        running_sshd(tmp_path, settings=settings) as sshd,
        pytest.raises(AuthError, match="it accepts no keys, only password") as caught,
    ):
        transport.connect(host_on(sshd))
    assert "dtrain sends no passwords" in caught.value.hint


def test_a_server_that_allows_nothing(transport: SshTransport, tmp_path: Path) -> None:
    off = ("Pubkey", "Password", "KbdInteractive")
    settings = {f"{method}Authentication": "no" for method in off}
    with (
        running_sshd(tmp_path, settings=settings) as sshd,
        pytest.raises(AuthError, match=r"it allows no authentication method$") as caught,
    ):
        transport.connect(host_on(sshd))
    assert "check AuthenticationMethods" in caught.value.hint


def test_a_server_that_wants_more_than_a_key(transport: SshTransport, tmp_path: Path) -> None:
    settings = {
        "AuthenticationMethods": "publickey,password",
        "PasswordAuthentication": "yes",
    }
    with (
        running_sshd(tmp_path, settings=settings) as sshd,
        pytest.raises(AuthError, match="accepted a key but also requires password"),
    ):
        transport.connect(host_on(sshd))
