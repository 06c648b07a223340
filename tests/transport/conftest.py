"""Fixtures of the transport tests: an isolated home folder, servers, and hosts on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain.transport.ssh import SshTransport
from support.sshd import Sshd, running_sshd


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder and no agent, so that the user's own have no effect."""
    folder = tmp_path / "home"
    (folder / ".ssh").mkdir(parents=True, mode=0o700)
    # Debian's configuration for all users sets it.
    (folder / ".ssh" / "config").write_text("HashKnownHosts no\n")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return folder


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """One real server, shared by all tests that do not change it."""
    # Many tests connect, some without logging in.
    with running_sshd(tmp_path_factory.mktemp("shared"), settings={"MaxStartups": "100"}) as server:
        yield server


@pytest.fixture
def bastion(tmp_path: Path, sshd: Sshd) -> Iterator[Sshd]:
    with running_sshd(tmp_path, name="bastion", identity=sshd.identity) as server:
        yield server


@pytest.fixture
def notices() -> list[str]:
    """Notices that the transport gave to the user."""
    return []


@pytest.fixture
def make_transport(tmp_path: Path, notices: list[str]) -> Iterator[Callable[..., SshTransport]]:
    """Creates SshTransports."""
    made: list[SshTransport] = []

    def make(**options: Any) -> SshTransport:
        transport = SshTransport(tmp_path, notice=notices.append, **options)
        made.append(transport)
        return transport

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def transport(make_transport: Callable[..., SshTransport]) -> SshTransport:
    return make_transport()
