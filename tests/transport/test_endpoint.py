"""Endpoints: the cluster file overrides ssh's configuration, which overrides defaults."""

from __future__ import annotations

import getpass
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.diagnostics import ConnectError
from dtrain.failures.alike import hints, messages
from dtrain.spec.model import Host, Ssh
from dtrain.transport.endpoint import Endpoint, Resolver

Resolve = Callable[..., Endpoint]
ME = getpass.getuser()


@pytest.fixture
def resolve(home: Path, tmp_path: Path, notices: list[str]) -> Resolve:
    def resolve(
        text: str, address: str = "10.0.0.1", name: str = "gpu01", **ssh: object
    ) -> Endpoint:
        (home / ".ssh" / "config").write_text(text)
        resolver = Resolver(tmp_path / "cluster", notices.append)
        return resolver.resolve(Host(name, address, ssh=Ssh(**ssh)))  # type: ignore[arg-type]

    return resolve


def test_defaults(resolve: Resolve, home: Path) -> None:
    endpoint = resolve("")
    assert (endpoint.address, endpoint.port, endpoint.user) == ("10.0.0.1", 22, ME)
    assert endpoint.identities == ()
    assert endpoint.default_identities[0] == home / ".ssh" / "id_rsa"
    assert endpoint.user_known_hosts[0] == home / ".ssh" / "known_hosts"
    assert endpoint.known_names == ("10.0.0.1", "gpu01")
    assert endpoint.attempted == f"connecting to gpu01 (10.0.0.1:22) as {ME}"
    assert endpoint.command == f"ssh -p 22 {ME}@10.0.0.1"
    assert (endpoint.timeout, endpoint.alive_interval, endpoint.alive_count) == (15.0, 15.0, 3)


CONFIG = """
Host gpu01
    HostName %h.cluster
    User ml
    Port 2222
    IdentityFile ~/keys/%r@%n
    IdentitiesOnly yes
    UserKnownHostsFile /known1 /known2
    HostKeyAlias the-gpu
    ConnectTimeout 4
    ServerAliveInterval 5
    ServerAliveCountMax 2
    IdentityAgent /agent.sock
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
    assert endpoint.user_known_hosts == (Path("/known1"), Path("/known2"))
    assert endpoint.known_names == ("the-gpu",)
    assert (endpoint.timeout, endpoint.alive_interval, endpoint.alive_count) == (4.0, 5.0, 2)
    assert endpoint.agent == "/agent.sock"
    assert endpoint.hash_known_hosts


def test_the_cluster_file_overrides_the_configuration(resolve: Resolve, tmp_path: Path) -> None:
    endpoint = resolve(
        CONFIG, user="root", port=22, identity="id", known_hosts="./known", connect_timeout=30.0
    )
    assert (endpoint.port, endpoint.user, endpoint.timeout) == (22, "root", 30.0)
    assert endpoint.identities == (tmp_path / "cluster" / "id",)
    assert endpoint.user_known_hosts == (tmp_path / "cluster" / "known",)
    assert resolve("", identity="id").default_identities == ()


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
    assert endpoint.command == f"ssh -p 2201 {ME}@fd00::1"


def test_jump_chain(resolve: Resolve) -> None:
    config = "Host inner\n  User deep\n  Port 2200\nHost gpu01\n  ProxyJump a@outer:2022,inner\n"
    endpoint = resolve(config)
    inner = endpoint.via
    assert inner and inner.via
    assert (inner.host, inner.user, inner.port) == ("inner", "deep", 2200)
    assert (inner.via.host, inner.via.user, inner.via.port) == ("outer", "a", 2022)
    assert endpoint.attempted == f"connecting to gpu01 (10.0.0.1:22) as {ME} via inner"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("bastion", (ME, "bastion", 22)),
        ("ml@bastion", ("ml", "bastion", 22)),
        ("ml@bastion:2022", ("ml", "bastion", 2022)),
        ("[fd00::1]:2022", (ME, "fd00::1", 2022)),
        ("[fd00::1]", (ME, "fd00::1", 22)),
        ("ssh://ml@bastion:2022", ("ml", "bastion", 2022)),
    ],
)
def test_jump_spellings(resolve: Resolve, spec: str, expected: tuple[str, str, int]) -> None:
    via = resolve("", jump=spec).via
    assert via and (via.user, via.address, via.port) == expected


def test_an_ipv6_address_of_a_jump_host_needs_brackets(resolve: Resolve) -> None:
    reason = "'fd00::1' is not a jump host: .* with brackets around an IPv6 address"
    with pytest.raises(ConnectError, match=f"^gpu01: reading ssh's configuration: {reason}"):
        resolve("", jump="fd00::1")


def test_the_port_of_a_jump_host_that_none_has(resolve: Resolve) -> None:
    reason = "the port of jump host 'bastion:70000' is not between 1 and 65535"
    with pytest.raises(ConnectError, match=f"^gpu01: reading ssh's configuration: {reason}"):
        resolve("", jump="bastion:70000")


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
    with pytest.raises(ConnectError, match="does not support the token %x"):
        resolve("ProxyCommand relay %x\n")


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
        ("Port twenty\n", "config line 1: Bad port 'twenty'"),
        ("ProxyJump a:b:c@\n", 'config line 1: Invalid ProxyJump "a:b:c@"'),
    ],
)
def test_bad_configuration_is_explained(resolve: Resolve, config: str, message: str) -> None:
    with pytest.raises(ConnectError) as caught:
        resolve(config)
    assert message in caught.value.message
    assert caught.value.message.startswith("gpu01: reading ssh's configuration: ")
    assert "ssh -G gpu01" in caught.value.hint


def test_a_machine_without_ssh_needs_no_configuration(home: Path, tmp_path: Path) -> None:
    config = home / ".ssh" / "config"
    resolver = Resolver(tmp_path, print, ssh=None)
    with pytest.raises(ConnectError) as caught:
        resolver.resolve(Host("gpu01", "10.0.0.1"))
    assert f"{config} cannot be evaluated: the `ssh` program is not installed" in str(caught.value)
    ssh = Ssh(user="ml", port=2201, jump="gate")
    with_null = replace(ssh, config="/dev/null")
    first = resolver.resolve(Host("gpu01", "10.0.0.1", ssh=with_null))
    config.unlink()
    for endpoint in (first, resolver.resolve(Host("gpu01", "10.0.0.1", ssh=ssh))):
        assert (endpoint.user, endpoint.port, endpoint.address) == ("ml", 2201, "10.0.0.1")
        assert endpoint.via and (endpoint.via.user, endpoint.via.address) == (ME, "gate")
        assert endpoint.user_known_hosts[0] == home / ".ssh" / "known_hosts"


def test_another_home_folder_has_the_configuration(
    resolve: Resolve, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ssh itself ignores HOME. No temporary file is needed, and none is left."""
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent")
    assert resolve("Match exec true\n  Port 2201\n").port == 2201
    assert resolve("Match final\n  Port 2202\n").port == 2202  # ssh reads it twice
    (home / ".ssh" / "config").chmod(0o622)
    with pytest.raises(ConnectError, match=f"Bad owner or permissions on {home}/.ssh/config"):
        resolve("Port 2201\n")


def test_hosts_whose_addresses_only_ssh_knows_share_a_problem(resolve: Resolve) -> None:
    config = "Host gpu01\n  HostName 10.0.0.1\nHost gpu02\n  HostName 10.0.0.2"
    problems = []
    for name in ("gpu01", "gpu02"):
        endpoint = resolve(config, name, name)
        problems.append(endpoint.error(ConnectError, "refused", hint=f"try `{endpoint.command}`"))
    attempted = f"connecting to gpu01 (10.0.0.1:22) as {ME}"
    same = "(shown for gpu01; same on the others)"
    assert messages(problems, []) == [f"gpu[01-02]: {attempted}: refused {same}"]
    assert hints(problems, []) == [f"try `ssh -p 22 {ME}@10.0.0.1` {same}"]
