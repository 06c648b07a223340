"""Options from the real `ssh -G`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from dtrain.diagnostics import ConnectError
from dtrain.node.agent.processes import look
from dtrain.spec.model import Host, Ssh
from dtrain.transport.endpoint import Endpoint, Resolver
from dtrain.transport.ssh_options import SshConfigError
from dtrain.transport.ssh_query import SshQuery
from support.limits import until

SSH = shutil.which("ssh") or ""

Resolve = Callable[..., Endpoint]


@pytest.fixture
def resolver(tmp_path: Path, notices: list[str]) -> Resolver:
    return Resolver(tmp_path, notices.append)


@pytest.fixture
def resolve(tmp_path: Path, resolver: Resolver) -> Resolve:
    """Resolves gpu01 with the cluster file's configuration, which ssh itself reads."""

    def resolve(text: str, name: str = "gpu01", **ssh: object) -> Endpoint:
        (tmp_path / "config").write_text(text)
        settings = Ssh(config="config", **ssh)  # type: ignore[arg-type]
        return resolver.resolve(Host(name, name, ssh=settings))

    return resolve


def test_ssh_reads_the_configuration(resolve: Resolve, tmp_path: Path) -> None:
    (tmp_path / "more").write_text("ServerAliveInterval 1m\n")
    endpoint = resolve(
        f"""
        Match exec "test %n = gpu01 -a %p = 2201 -a %r = ml"
            HostName %h.example.com
            IdentityFile ~/keys/%r@%h
        Host *
            Include {tmp_path}/more
            ConnectTimeout 10s
            HashKnownHosts True
            AddressFamily INET6
            BindAddress ::1
            Ciphers aes256-ctr,aes128-ctr
        """,
        user="ml",
        port=2201,
    )
    assert (endpoint.address, endpoint.port, endpoint.user) == ("gpu01.example.com", 2201, "ml")
    assert [path.name for path in endpoint.identities] == ["ml@gpu01.example.com"]
    assert (endpoint.alive_interval, endpoint.timeout) == (60.0, 10.0)
    assert endpoint.hash_known_hosts
    assert endpoint.family.name == "AF_INET6"  # type: ignore[attr-defined]
    assert endpoint.bind_address == "::1"
    assert endpoint.algorithms.ciphers == ("aes256-ctr", "aes128-ctr")
    assert endpoint.algorithms.macs is None


@pytest.mark.parametrize("config", ["config", None])
def test_a_user_of_a_windows_domain(
    config: str | None, tmp_path: Path, resolver: Resolver, home: Path
) -> None:
    """Since OpenSSH 10.6, `ssh -l` refuses the name."""
    folder = home / ".ssh" if config is None else tmp_path
    text = "User other\nMatch user *ml\n  Port 2201\n  ProxyCommand nc %r\n"
    (folder / "config").write_text(text)
    host = Host("gpu01", "gpu01", ssh=Ssh(user="CORP\\ml", config=config))
    endpoint = resolver.resolve(host)
    assert (endpoint.user, endpoint.port) == ("CORP\\ml", 2201)
    assert endpoint.proxy_command == "nc CORP\\ml"


@pytest.mark.parametrize("user", ["CORP\\m #l", "CORP\\\\ml", "a\\\\\\b\\c"])
def test_a_hostile_name_of_a_user_is_kept(resolver: Resolver, user: str) -> None:
    assert resolver.resolve(Host("gpu01", "gpu01", ssh=Ssh(user=user))).user == user


def test_an_error_beside_a_name_with_a_backslash_has_its_place(
    resolver: Resolver, tmp_path: Path
) -> None:
    config = tmp_path / "own"
    config.write_text("Host *\n  Port 2201\n  Colour blue\n")
    ssh = Ssh(user="CORP\\ml", jump="CORP\\jo@one", config=str(config))
    with pytest.raises(ConnectError, match="Bad configuration option: colour") as caught:
        resolver.resolve(Host("gpu01", "gpu01", ssh=ssh))
    assert f"{config}: line 3: Bad" in caught.value.message


@pytest.mark.parametrize("user", ["ml", "CORP\\ml"])
def test_a_jump_host_with_a_user_of_a_windows_domain(
    user: str, tmp_path: Path, resolver: Resolver
) -> None:
    """Since OpenSSH 10.6, `ssh -J` refuses the name."""
    (tmp_path / "config").write_text("Host *\n  ProxyJump other\n  ProxyCommand nc\n")
    ssh = Ssh(user=user, jump="CORP\\jo@one:2201,\n two", config="config")
    endpoint = resolver.resolve(Host("gpu01", "gpu01", ssh=ssh))
    assert (endpoint.user, endpoint.proxy_command) == (user, None)
    two = endpoint.via
    assert two is not None
    assert two.via is not None
    assert (two.address, two.via.address, two.via.port) == ("two", "one", 2201)
    assert two.via.user == "CORP\\jo"


def test_a_configuration_that_cannot_be_read(tmp_path: Path, resolver: Resolver) -> None:
    (tmp_path / "config").mkdir()
    host = Host("gpu01", "gpu01", ssh=Ssh(user="CORP\\ml", config="config"))
    with pytest.raises(ConnectError, match="config cannot be read: Is a directory"):
        resolver.resolve(host)


def test_the_default_key_files_are_those_of_ssh(resolve: Resolve) -> None:
    names = [path.name for path in resolve("").default_identities]
    assert names[:2] == ["id_rsa", "id_ecdsa"]
    assert "id_ed25519" in names
    assert resolve("IdentityFile none\n").default_identities == ()


def test_jumps_of_the_cluster_file_and_of_the_configuration(resolve: Resolve) -> None:
    config = "Host inner\n  User deep\nHost gpu*\n  ProxyJump a@outer:2022,inner\n"
    inner = resolve(config).via
    assert inner and inner.via
    assert (inner.host, inner.user, inner.via.user, inner.via.port) == ("inner", "deep", "a", 2022)
    assert resolve(config, jump="none").via is None
    gate = resolve(config, jump="gate").via
    assert gate and (gate.host, gate.via) == ("gate", None)


def test_a_jump_host_for_all_hosts_is_not_its_own_jump_host(resolve: Resolve) -> None:
    endpoint = resolve("ProxyJump bastion\n")
    assert endpoint.via and (endpoint.via.host, endpoint.via.via) == ("bastion", None)


def test_paths_that_ssh_prints_without_quotes(resolve: Resolve) -> None:
    assert resolve("UserKnownHostsFile /a /b\n").user_known_hosts == (Path("/a"), Path("/b"))
    assert resolve("UserKnownHostsFile none\n").user_known_hosts == ()
    with pytest.raises(ConnectError, match=r"userknownhostsfile .* is ambiguous"):
        resolve('UserKnownHostsFile /a "/b c"\n')


def test_errors_of_ssh_are_passed_on(resolve: Resolve, tmp_path: Path) -> None:
    with pytest.raises(ConnectError) as caught:
        resolve("Port 22\nPrt 22\nMatch exec 'echo tty >&2; false'\n")
    assert caught.value.host == "gpu01"
    assert "config: line 2: Bad configuration option: prt" in caught.value.reason
    assert "debug1" not in caught.value.reason
    (tmp_path / "more").write_text("")
    (tmp_path / "more").chmod(0o666)
    with pytest.raises(ConnectError, match=f"Bad owner or permissions on {tmp_path}/more"):
        resolve(f"Include {tmp_path}/more\n")


def test_a_name_that_looks_like_an_option_reaches_no_program(
    resolve: Resolve, tmp_path: Path
) -> None:
    # dtrain refuses it. SshQuery would still pass it as a name.
    with pytest.raises(ConnectError, match="OpenSSH refuses"):
        resolve("", name=f"-oProxyCommand=touch {tmp_path}/ran")
    with pytest.raises(SshConfigError, match="hostname contains invalid characters"):
        SshQuery(SSH).options(f"-oProxyCommand=touch {tmp_path}/ran", (), ())
    assert not (tmp_path / "ran").exists()


def test_a_hanging_command_is_killed(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f'Match exec "echo $$ >{tmp_path}/pid; exec sleep 600"\n')
    for seconds in (1, 10):  # a busy machine starts the command late
        with pytest.raises(SshConfigError, match=f"did not finish within {seconds} s"):
            SshQuery(SSH, timeout=float(seconds)).options("gpu01", ("-F", str(config)), ())
        if (tmp_path / "pid").exists():
            break
    pid = int((tmp_path / "pid").read_text())
    until(lambda: (proc := look(pid)) is None or not proc.alive, "the end of the command")


def test_an_answer_is_cached_until_a_file_changes(resolver: Resolver, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    config, more = tmp_path / "config", tmp_path / "more"
    config.write_text(f'Match exec "echo %n >>{asked}"\n  Include {more}\n')
    more.write_text("Port 1\n")
    hosts = [
        Host(f"gpu{n:02}", f"10.0.0.{n}", ssh=Ssh(config="config", jump="bastion"))
        for n in range(8)
    ]
    for port in (1, 1, 2):
        if port == 2:
            more.write_text("Port 2222\n")
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(resolver.resolve, hosts))
        assert {endpoint.port for endpoint in found} == {1 if port == 1 else 2222}
        times = 1 if port == 1 else 2
        names = sorted([*(host.name for host in hosts), "bastion"] * times)
        assert sorted(asked.read_text().split()) == names


@pytest.mark.parametrize("fault", ["long path", "many messages"])
def test_names_share_no_answer_if_messages_may_lack_a_file(tmp_path: Path, fault: str) -> None:
    config, more = tmp_path / "config", tmp_path / "more"
    if fault == "long path":
        folder = tmp_path / ("x" * (197 - len(str(tmp_path))))
        folder.mkdir()
        more = folder / "more"
        (folder / "m").write_text("")  # all that a message shows of the path
    more.write_text("Host gpu1\n Port 1\n")
    many = 20_000 if fault == "many messages" else 0
    config.write_text(many * "Host *\n" + f"Include {more}\n")
    query = SshQuery(SSH)
    found = [query.options(name, ("-F", str(config)), ()) for name in ("gpu2", "gpu1")]
    assert [each.get("port") for each in found] == ["22", "1"]


def test_a_file_that_changes_while_ssh_runs_is_read_again(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f'Match exec "sed -i s/2201/2202/ {config}"\n  Port 2201\n')
    query = SshQuery(SSH)
    found = [query.options("gpu01", ("-F", str(config)), [config]) for _ in range(2)]
    assert [each.get("port") for each in found] == ["2201", "2202"]


NAMES = [
    "gpu1",
    "gpu2",
    "gpu10",
    "cpu1",
    "bastion",
    "ba",
    "GPU3",
    "10.0.0.7",
    "n1.example",
    "user",
    30 * "n",
]
CONFIGS = {
    "none": "",
    "patterns": "Host gpu* !gpu2\n Port 1\nhost = gpu? #x\n User user\n Host *1\nCompression yes\n",
    "names": 'Host gpu1\n Port 1\nHost "gpu2" cpu1\n Port 2\n"Host" gpu10\n Port 3\n',
    "capitals": "Host GPU*\n Port 1\nHost gp[u]1\n Port 2\n",
    "addresses": "Host 10.0.*\n Port 1\nHost *.ex?mple\n Port 2\n",
    "tokens": "ControlPath ~/.ssh/%r@%h:%p\nHostName %h.example.com\nIdentityFile ~/%n\n",
    "hash": "ControlPath ~/.ssh/%C\n",
    "match": 'Match host gpu1\n Port 1\nMatch !exec "test %n = gpu2"\n Port 2\n',
    "jump": "ProxyJump bastion\n",
    "canonical": "CanonicalizeHostname yes\nCanonicalDomains invalid\nHost gpu1.*\n Port 1\n",
    "one name": "Host gpu?\n HostName GPU1\n",
    "quotes in keywords": 'Ho"st" gpu1\n Port 1\nM"atch" host cpu1\n Port 2\n',
    "quotes in tokens": "ControlPath ~/.ssh/%\"C\"\nIdentityFile ~/%'C'\n",
    "zero bytes": "Host gpu1\0x\n Port 1\nHost *u2\0x\n Port 2\n",
    "carriage returns": "Host\rgpu1\n Port 1\nHost cpu*\r\n Port 2\n",
    "stars": f"Host {20 * '*'}gpu1\n Port 1\n",
    "included": "Host gpu*\n Include {more}\nHost *\n Port 3\n",
}


@pytest.mark.parametrize("config", CONFIGS)
def test_names_that_share_an_answer_get_what_ssh_says_of_each(config: str, tmp_path: Path) -> None:
    more = tmp_path / "more"
    more.write_text("Host *1*\n Port 1\n")
    (tmp_path / "config").write_bytes(CONFIGS[config].format(more=more).encode())
    arguments = ("-F", str(tmp_path / "config"), "-l", "root")
    shared = SshQuery(SSH)

    def options(query: SshQuery, name: str) -> object:
        try:
            return query.options(name, arguments, ()).values
        except SshConfigError as error:
            return str(error)

    with ThreadPoolExecutor(len(NAMES)) as pool:
        found = dict(zip(NAMES, pool.map(partial(options, shared), NAMES), strict=True))
    assert found == {name: options(SshQuery(SSH), name) for name in NAMES}


def test_ssh_is_asked_once_for_all_names_that_match_the_same_patterns(tmp_path: Path) -> None:
    config, asked = tmp_path / "config", tmp_path / "asked"
    config.write_text("# %h\nHost gpu*\n  Port 2201\nHost *\n  User ml\n")
    program = tmp_path / "ssh"
    program.write_text(f'#!/bin/sh\nfor name; do :; done\necho $name >>{asked}\nexec {SSH} "$@"\n')
    program.chmod(0o700)
    query = SshQuery(str(program))
    names = [f"{kind}{number}" for kind in ("gpu", "cpu") for number in range(20)]
    for port in ("2201", "2202"):
        config.write_text(config.read_text().replace("2201", port))
        with ThreadPoolExecutor(8) as pool:
            found = pool.map(lambda name: query.options(name, ("-F", str(config)), ()), names)
        assert [each.get("port") for each in found] == 20 * [port] + 20 * ["22"]
    known, *others = asked.read_text().split()
    assert known == "host"
    assert sorted(name[:3] for name in others) == ["cpu", "cpu", "gpu", "gpu"]


@pytest.mark.skipif(os.getuid() != 0, reason="binds a folder over the account's home folder")
def test_the_accounts_own_configuration(tmp_path: Path) -> None:
    """Runs in a mount namespace, so that the test can replace the account's home folder."""
    home = tmp_path / "account"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    (home / ".ssh" / "config").write_text('Match exec "true"\n  Port 2201\n')
    script = """
import os, pathlib, pwd, subprocess, sys
from dtrain.diagnostics import ConnectError
from dtrain.spec.model import Host
from dtrain.transport.endpoint import Resolver
home = os.environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
subprocess.run(["mount", "--bind", sys.argv[1], home], check=True)
resolver = Resolver(pathlib.Path("/"), print)
print(resolver.resolve(Host("gpu01", "gpu01")).port)
os.chmod(home + "/.ssh/config", 0o666)
try:
    resolver.resolve(Host("gpu01", "gpu01"))
except ConnectError as error:
    print(error.reason.replace(home, "~"))
"""
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", script, str(home)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "2201",
        "Bad owner or permissions on ~/.ssh/config",
    ], done.stderr
