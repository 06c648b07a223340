"""Prompts on a real terminal: the passphrase of a key, and a server's questions."""

from __future__ import annotations

import base64
import fcntl
import os
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.launching import PATIENCE, Scene
from support.ssh_server import CODE, SshServer, TwoFactor
from support.sshd import Sshd, generate_key, running_sshd

pytestmark = pytest.mark.sshd
SECRET = "open sesame"  # noqa: S105


class Terminal:
    """A `dtrain launch` whose controlling terminal is ours to read and type on."""

    def __init__(self, scene: Scene, cluster: Path) -> None:
        self._ours, theirs = os.openpty()
        environment = {**os.environ, "DTRAIN_HOME": str(scene.home), "TERM": "dumb"}
        environment.pop("SSH_AUTH_SOCK", None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dtrain_cli", "launch", str(cluster)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self.seen = b""

    def until(self, text: bytes) -> None:
        while text not in self.seen:
            try:
                self.seen += os.read(self._ours, 1 << 16)
            except OSError:  # the launch has ended
                raise AssertionError(self.seen.decode(errors="replace")) from None

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    @property
    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self._ours)[3] & termios.ECHO)

    def wait(self) -> int:
        return self._process.wait(PATIENCE)


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    key = generate_key(tmp_path / "encrypted")
    with running_sshd(tmp_path, identity=key) as sshd:
        change = ["ssh-keygen", "-q", "-p", "-P", "", "-N", SECRET, "-f", str(key)]
        subprocess.run(change, check=True, timeout=PATIENCE)
        yield sshd


@pytest.fixture
def cluster(scene: Scene, sshd: Sshd) -> Path:
    """Two hosts behind one sshd."""
    return two_hosts(scene, sshd.port, sshd.identity, sshd.known_hosts)


def two_hosts(scene: Scene, port: int, identity: Path, known_hosts: Path, **ssh: str) -> Path:
    settings = {"port": port, "identity": str(identity), "known_hosts": str(known_hosts), **ssh}
    return scene.write(
        {
            "cluster": {
                "hosts": ["a", "b"],
                "gpus": 0,
                "python": sys.executable,
                "run_dir": str(scene.nodes),
                "ssh": settings,
                "overrides": {"a": {"address": "127.0.0.1"}, "b": {"address": "127.0.0.1"}},
            },
            "job": {
                "framework": "torch",
                "script": str(scene.script("print('trained')")),
                "env": {scene.mark: "1"},
            },
        }
    )


def test_asked_once_for_all_hosts(scene: Scene, cluster: Path) -> None:
    terminal = Terminal(scene, cluster)
    terminal.until(b"Passphrase for ")
    assert not terminal.echoes
    terminal.type(SECRET.encode() + b"\n")
    terminal.until(b"all 2 workers finished")
    assert terminal.wait() == 0
    assert terminal.seen.count(b"Passphrase") == 1
    assert SECRET.encode() not in terminal.seen
    assert terminal.echoes


def test_ctrl_c_at_the_prompt_ends_the_launch(scene: Scene, cluster: Path) -> None:
    terminal = Terminal(scene, cluster)
    terminal.until(b"Passphrase for ")
    terminal.type(b"\x03")
    assert terminal.wait() == 130
    assert terminal.echoes
    assert scene.leftovers() == []


def test_a_jump_host_asks_its_questions_once(scene: Scene, tmp_path: Path) -> None:
    with running_sshd(tmp_path) as sshd:
        public = base64.b64decode(Path(f"{sshd.identity}.pub").read_text().split()[1])
        with SshServer(public) as bastion:
            bastion.login = TwoFactor
            known_hosts = tmp_path / "known"
            known_hosts.write_text(bastion.host_key_line + sshd.known_hosts.read_text())
            jump = f"ml@127.0.0.1:{bastion.port}"
            cluster = two_hosts(scene, sshd.port, sshd.identity, known_hosts, jump=jump)
            terminal = Terminal(scene, cluster)
            terminal.until(b"ml@127.0.0.1: Name: ")
            assert terminal.echoes
            terminal.type(b"me\n")
            terminal.until(b"ml@127.0.0.1: Code: ")
            assert not terminal.echoes
            terminal.type(CODE.encode() + b"\n")
            terminal.until(b"all 2 workers finished")
            assert terminal.wait() == 0
            assert terminal.seen.count(b"Code") == 1
            assert b"Name: me\r\n" in terminal.seen
            assert CODE.encode() not in terminal.seen
            assert terminal.echoes
