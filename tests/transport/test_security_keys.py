"""Logins with a FIDO security key, which only an ssh agent can use."""

from __future__ import annotations

import base64
import hashlib
import socketserver
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dtrain.diagnostics import AuthError
from dtrain.transport.ssh import SshTransport
from support.sshd import Sshd, host_on

pytestmark = pytest.mark.sshd

KIND = b"sk-ssh-ed25519@openssh.com"
APPLICATION = b"ssh:"
TOUCHED = b"\x01"


def text(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


class SecurityKey:
    """A key as a security key has it. OpenSSH's PROTOCOL.u2f describes its formats."""

    def __init__(self) -> None:
        self._secret = Ed25519PrivateKey.generate()
        public = self._secret.public_key().public_bytes_raw()
        self.blob = text(KIND) + text(public) + text(APPLICATION)
        self.line = f"{KIND.decode()} {base64.b64encode(self.blob).decode()}\n"

    def sign(self, data: bytes) -> bytes:
        after = TOUCHED + struct.pack(">I", 7)  # the device counts its signatures
        digests = [hashlib.sha256(one).digest() for one in (APPLICATION, data)]
        signature = self._secret.sign(digests[0] + after + digests[1])
        return text(KIND) + text(signature) + after

    def write(self, path: Path) -> None:
        """The key's file, with a handle by which the device knows the key."""
        handle = self.blob + TOUCHED + text(b"handle") + text(b"")
        private = 2 * b"\0\0\0\1" + handle + text(b"comment")
        private += bytes(range(1, 1 + -len(private) % 8))
        data = b"openssh-key-v1\0" + text(b"none") + text(b"none") + text(b"") + b"\0\0\0\1"
        encoded = base64.encodebytes(data + text(self.blob) + text(private)).decode()
        name = "OPENSSH PRIVATE KEY"
        path.write_text(f"-----BEGIN {name}-----\n{encoded}-----END {name}-----\n")
        path.chmod(0o600)
        Path(f"{path}.pub").write_text(self.line)


@pytest.fixture
def key(sshd: Sshd) -> Iterator[SecurityKey]:
    """A key that the shared server accepts."""
    before = sshd.authorized_keys.read_text()
    made = SecurityKey()
    sshd.authorized_keys.write_text(before + made.line)
    yield made
    sshd.authorized_keys.write_text(before)


@pytest.fixture
def agent(key: SecurityKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An agent with the key. A real one would need the device, or a library in its place."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while size := self.rfile.read(4):
                request = self.rfile.read(struct.unpack(">I", size)[0])
                if request[0] == 11:  # which keys?
                    reply = b"\x0c" + struct.pack(">I", 1) + text(key.blob) + text(b"comment")
                else:  # sign
                    (length,) = struct.unpack(">I", request[1:5])
                    data = request[5 + length + 4 : -4]
                    reply = b"\x0e" + text(key.sign(data))
                self.wfile.write(text(reply))

    path = tmp_path / "agent.sock"
    with socketserver.ThreadingUnixStreamServer(str(path), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        yield
        server.shutdown()


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("named", [False, True])
def test_an_agent_signs_with_it(
    transport: SshTransport, sshd: Sshd, key: SecurityKey, tmp_path: Path, named: bool
) -> None:
    key.write(tmp_path / "id")
    identity = str(tmp_path / "id") if named else None
    transport.connect(host_on(sshd, identity=identity)).close()


def test_without_an_agent_the_error_says_how_to_load_it(
    transport: SshTransport, sshd: Sshd, key: SecurityKey, tmp_path: Path
) -> None:
    key.write(tmp_path / "id")
    with pytest.raises(AuthError, match="only through the ssh agent") as caught:
        transport.connect(host_on(sshd, identity=str(tmp_path / "id")))
    assert caught.value.hint == f"load the key with `ssh-add {tmp_path / 'id'}`"
