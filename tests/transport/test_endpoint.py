"""Endpoints: the cluster file overrides ssh's configuration, which overrides defaults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dtrain.diagnostics import ConnectError
from dtrain.spec.model import Host, Ssh
from dtrain.transport.endpoint import Endpoint, Resolver

Resolve = Callable[..., Endpoint]


@pytest.fixture
def resolve(
    home: Path, tmp_path: Path, notices: list[str], monkeypatch: pytest.MonkeyPatch
) -> Resolve:
    monkeypatch.setenv("LOGNAME", "me")

    def resolve(
        text: str, address: str = "10.0.0.1", name: str = "gpu01", **ssh: object
    ) -> Endpoint:
        (home / ".ssh" / "config").write_text(text)
        resolver = Resolver(tmp_path / "cluster", tmp_path / "none", notices.append)
        return resolver.resolve(Host(name, address, ssh=Ssh(**ssh)))  # type: ignore[arg-type]

    return resolve


def test_defaults(resolve: Resolve, home: Path) -> None:
    endpoint = resolve("")
    assert (endpoint.address, endpoint.port, endpoint.user) == ("10.0.0.1", 22, "me")
    assert endpoint.identities == ()
    assert endpoint.default_identities[0] == home / ".ssh" / "id_rsa"
    assert endpoint.user_known_hosts[0] == home / ".ssh" / "known_hosts"
    assert endpoint.known_names == ("10.0.0.1", "gpu01")
    assert endpoint.attempted == "connecting to gpu01 (10.0.0.1:22) as me"
    assert endpoint.command == "ssh -p 22 me@10.0.0.1"
    assert (endpoint.timeout, endpoint.alive_interval, endpoint.alive_count) == (15.0, 15.0, 3)


CONFIG = """
Host gpu01
    HostName %h.cluster
    User ml
    Port 2222
    IdentityFile ~/keys/%r@%n
    IdentitiesOnly yes
    UserKnownHostsFile ~/known1 "/known 2"
    HostKeyAlias the-gpu
    ConnectTimeout 4
    ServerAliveInterval 5
    ServerAliveCountMax 2
    IdentityAgent ~/agent.sock
    HashKnownHosts yes
"""


def test_the_configuration_sets_what_the_cluster_file_does_not(
    resolve: Resolve, home: Path
) -> None:
    endpoint = resolve(CONFIG)
    assert (endpoint.address, endpoint.port, endpoint.user) == ("gpu01.cluster", 2222, "ml")
    assert endpoint.identities == (home / "keys" / "ml@gpu01",)
    assert endpoint.default_identities == ()
    assert endpoint.identities_only
    assert endpoint.user_known_hosts == (home / "known1", Path("/known 2"))
    assert endpoint.known_names == ("the-gpu",)
    assert (endpoint.timeout, endpoint.alive_interval, endpoint.alive_count) == (4.0, 5.0, 2)
    assert endpoint.agent == str(home / "agent.sock")
    assert endpoint.hash_known_hosts


def test_the_cluster_file_overrides_the_configuration(resolve: Resolve, tmp_path: Path) -> None:
    endpoint = resolve(
        CONFIG, user="root", port=22, identity="id", known_hosts="./known", connect_timeout=30.0
    )
    assert (endpoint.port, endpoint.user, endpoint.timeout) == (22, "root", 30.0)
    assert endpoint.identities == (tmp_path / "cluster" / "id",)
    assert endpoint.user_known_hosts == (tmp_path / "cluster" / "known",)


def test_a_config_of_the_cluster_file_replaces_the_users_own(
    resolve: Resolve, tmp_path: Path
) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "ssh_config").write_text("Host gpu01\n  User other\n")
    assert resolve(CONFIG, config="ssh_config").user == "other"
    assert resolve(CONFIG, config="ssh_config").port == 22
    with pytest.raises(ConnectError, match="no such file"):
        resolve(CONFIG, config="missing")


def test_names_of_a_host_in_known_hosts(resolve: Resolve) -> None:
    endpoint = resolve("", port=2201)
    assert endpoint.known_names == ("[10.0.0.1]:2201", "10.0.0.1", "[gpu01]:2201", "gpu01")


def test_ipv6_addresses_get_brackets(resolve: Resolve) -> None:
    endpoint = resolve("", address="fd00::1", port=2201)
    assert endpoint.place == "[fd00::1]:2201"
    assert endpoint.command == "ssh -p 2201 me@fd00::1"


def test_jump_chain(resolve: Resolve) -> None:
    config = "Host inner\n  User deep\n  Port 2200\nHost gpu01\n  ProxyJump a@outer:2022,inner\n"
    endpoint = resolve(config)
    inner = endpoint.via
    assert inner and inner.via
    assert (inner.host, inner.user, inner.port) == ("inner", "deep", 2200)
    assert (inner.via.host, inner.via.user, inner.via.port) == ("outer", "a", 2022)
    assert endpoint.attempted == "connecting to gpu01 (10.0.0.1:22) as me via inner"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("bastion", ("me", "bastion", 22)),
        ("ml@bastion", ("ml", "bastion", 22)),
        ("ml@bastion:2022", ("ml", "bastion", 2022)),
        ("[fd00::1]:2022", ("me", "fd00::1", 2022)),
        ("fd00::1", ("me", "fd00::1", 22)),
        ("ssh://ml@bastion:2022", ("ml", "bastion", 2022)),
    ],
)
def test_jump_spellings(resolve: Resolve, spec: str, expected: tuple[str, str, int]) -> None:
    via = resolve("", jump=spec).via
    assert via and (via.user, via.address, via.port) == expected


def test_a_jump_host_has_its_own_jump_host_in_the_configuration(resolve: Resolve) -> None:
    endpoint = resolve("Host bastion\n  ProxyJump gate\n", jump="bastion")
    assert endpoint.via and endpoint.via.via and endpoint.via.via.host == "gate"


def test_a_jump_host_for_all_hosts_is_not_its_own_jump_host(resolve: Resolve) -> None:
    endpoint = resolve("Host *\n  ProxyJump bastion\n")
    assert endpoint.via and endpoint.via.host == "bastion"
    assert endpoint.via.via is None


def test_jump_none_and_proxy_command_none(resolve: Resolve) -> None:
    assert resolve("ProxyJump bastion\n", jump="none").via is None
    assert resolve("ProxyJump none\n").via is None
    assert resolve("ProxyCommand none\n").proxy_command is None


def test_the_cluster_jump_overrides_a_proxy_command(resolve: Resolve) -> None:
    endpoint = resolve("Host gpu01\n  ProxyCommand nc %h %p\n", jump="bastion")
    assert endpoint.via and endpoint.proxy_command is None


def test_proxy_command_tokens(resolve: Resolve) -> None:
    endpoint = resolve("ProxyCommand relay %r@%h:%p %n %%\n", port=2200, user="ml")
    assert endpoint.proxy_command == "relay ml@10.0.0.1:2200 gpu01 %"


def test_the_configuration_can_only_be_stricter_about_host_keys(
    resolve: Resolve, notices: list[str]
) -> None:
    assert not resolve("StrictHostKeyChecking no\n").accept_new
    assert "dtrain always checks host keys" in notices[0]
    assert not resolve("StrictHostKeyChecking accept-new\n").accept_new
    assert resolve("", host_keys="accept-new").accept_new
    assert not resolve("StrictHostKeyChecking yes\n", host_keys="accept-new").accept_new


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("Port twenty\n", "port 'twenty' is not a number"),
        ("Nonsense\n", "config:1: not `keyword value`"),
        ("ProxyJump a:b:c@\n", "is not a jump host"),
    ],
)
def test_bad_configuration_is_explained(resolve: Resolve, config: str, message: str) -> None:
    with pytest.raises(ConnectError) as caught:
        resolve(config)
    assert message in caught.value.message
    assert caught.value.message.startswith("gpu01: reading ssh's configuration: ")
    assert "ssh -G gpu01" in caught.value.hint
