#!/usr/bin/env python3
"""A local multi-host cluster: N hosts on this machine, each with its own address, host name,
process list, home folder, sshd and firewall.

    sudo .venv/bin/python scripts/cluster.py up 8   start 8 hosts, print a cluster file for them
    sudo .venv/bin/python scripts/cluster.py down   stop every cluster that this checkout started so
    sudo .venv/bin/python scripts/cluster.py down /var/tmp/dtrain-cluster-x   stop one cluster

A host is a set of Linux namespaces (network, host name, mounts, processes) under one small init.
All hosts connect to a bridge in a separate network namespace. One virtual cable connects that
bridge to this machine, so that a launcher on this machine reaches the hosts by SSH.

Init runs as long as its owner keeps its stdin open. When the owner ends, for any reason, the kernel
removes the processes, the interfaces, the mounts and the firewall. A crash leaves at most a folder
under /var/tmp, which the next cluster removes.

Hosts share the machine's files (the checkout, the Python), but not home folders, /run, /dev/shm or
/etc/hosts. As on Debian, a host's own name resolves to 127.0.1.1.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from namespace_host import USER, ClusterError, Host, run_script

PREFIX = "dtrain-cluster-"
STATE = Path("/var/tmp")  # noqa: S108 - every cluster takes a fresh folder with mkdtemp
CHECKOUT = str(Path(__file__).resolve().parents[1])
BOOT_LIMIT = 300.0
"""Seconds until every sshd must answer: a busy machine starts many hosts slowly."""


SSHD_CONFIG = """\
Port {port}
HostKey {key}
PidFile none
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
AuthorizedKeysFile .ssh/authorized_keys
Subsystem sftp internal-sftp
PrintMotd no
LogLevel VERBOSE
"""


class Cluster:
    """Hosts ``node1`` to ``nodeN``, running inside the ``with`` block.

    ``home_size`` (``"16M"``) puts the home folders on a disk of that size. Needs root. Raises
    ClusterError if the machine lacks a requirement.
    """

    def __init__(self, count: int, *, port: int = 22, home_size: str = "") -> None:
        if not 1 <= count <= 200:
            raise ClusterError(f"{count} hosts: between 1 and 200 are possible")
        _check_machine()
        _make_room_for_neighbors(count)
        _sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=STATE))
        self.folder.chmod(0o755)
        # Locked while this process runs, which another container may not see.
        self._owner = (self.folder / "owner").open("w")
        fcntl.flock(self._owner, fcntl.LOCK_EX)
        self._owner.write(_identity(os.getpid()))
        self._owner.flush()
        self.identity = self.folder / "identity"
        self.known_hosts = self.folder / "known_hosts"
        self.hosts: list[Host] = []
        self._switch: subprocess.Popen[bytes] | None = None
        self._subnet = 0
        self._cable = ""
        try:
            self._start(count, port, home_size)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    @property
    def gateway(self) -> str:
        """This machine's address among the hosts."""
        return f"10.213.{self._subnet}.254"

    def section(self, **overrides: object) -> dict[str, object]:
        """The ``cluster`` section of a cluster file for these hosts.

        One CPU worker on each host, started by the Python that runs this script. ``overrides``
        replace top-level keys.
        """
        return {
            "hosts": [host.name for host in self.hosts],
            "gpus": 0,
            "python": sys.executable,
            "ssh": {
                "user": "root",
                "port": self.hosts[0].port,
                "identity": str(self.identity),
                "known_hosts": str(self.known_hosts),
            },
            "overrides": {host.name: {"address": host.address} for host in self.hosts},
            **overrides,
        }

    def ssh(self, host: Host, *, user: str = "root") -> list[str]:
        """An ``ssh`` command line that accepts a command at its end."""
        return [
            "ssh", "-F", "none", "-p", str(host.port), "-i", str(self.identity),
            "-o", f"UserKnownHostsFile={self.known_hosts}", "-o", "BatchMode=yes",
            "-o", "IdentitiesOnly=yes", f"{user}@{host.address}",
        ]  # fmt: skip

    def cut(self, name: str) -> None:
        """Drop every packet from and to a host, including the launching machine's."""
        self[name].firewall("drop")

    def reset(self, name: str) -> None:
        """Reset every TCP connection from and to a host when it carries data. New ones get no
        answer."""
        self[name].firewall("meta l4proto tcp reject with tcp reset")

    def block(self, name: str, *others: str) -> None:
        """Drop packets between a host and other hosts (``launcher`` is this machine)."""
        rules = []
        for other in others:
            peers = [self.gateway] if other == "launcher" else [self[other].address]
            if other != "launcher":
                peers.append(self[other].address6)
            for peer in peers:
                family = "ip6" if ":" in peer else "ip"
                rules += [f"{family} saddr {peer} drop", f"{family} daddr {peer} drop"]
        self[name].firewall(*rules)

    def heal(self) -> None:
        """Remove all drop rules."""
        for host in self.hosts:
            if host.pid:
                host.firewall()

    def power_off(self, name: str) -> None:
        """End a host at once, without closing any connection. New ones fail after 3 s."""
        self.cut(name)
        self[name].halt()
        # The kernel removes the cable with its namespace, but only later.
        subprocess.run(
            [*self._in_switch(), "ip", "link", "del", name],
            stderr=subprocess.DEVNULL,
            check=False,
        )
        # As if some time had passed. Until then a new connection gets no answer.
        subprocess.run(["ip", "neigh", "flush", "to", self[name].address], check=False)

    def boot(self, *names: str) -> None:
        """Start hosts that are off, and wait for their sshd."""
        hosts = [self[name] for name in names]
        for host in hosts:
            host.spawn(self.identity)
        for host in hosts:
            host.read_pid()
        assert self._switch
        switch = self._switch.pid
        links = [
            # A reboot keeps the network card. Otherwise neighbors would look for the old address.
            f"link add eth0 netns {host.pid} address {host.mac}"
            f" type veth peer name {host.name} netns {switch}"
            for host in hosts
        ]
        run_script(["ip", "-batch", "-"], "\n".join(links))
        ports = [f"link set {host.name} master br0 up" for host in hosts]
        run_script([*self._in_switch(), "ip", "-batch", "-"], "\n".join(ports))
        for host in hosts:
            host.go()
        deadline = time.monotonic() + BOOT_LIMIT
        for host in hosts:
            host.wait_for_sshd(deadline)

    def close(self) -> None:
        """Stop every host and remove all files. Safe to call twice."""
        for host in self.hosts:
            host.halt()
        if self._cable:
            # While the switch still runs: afterwards the kernel removes the cable at some time, and
            # another cluster may take its name.
            subprocess.run(
                ["ip", "link", "del", self._cable], stderr=subprocess.DEVNULL, check=False
            )
            self._cable = ""
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()
            assert self._switch.stdin
            self._switch.stdin.close()
            self._switch = None
        shutil.rmtree(self.folder, ignore_errors=True)
        self._owner.close()

    def _in_switch(self) -> list[str]:
        assert self._switch
        return ["nsenter", "-t", str(self._switch.pid), "--net"]

    def _start(self, count: int, port: int, home_size: str) -> None:
        self._switch = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        self._lay_cable(self._switch.pid)
        _new_key(self.identity)
        known = []
        for number in range(1, count + 1):
            host = Host(
                name=f"node{number}",
                address=f"10.213.{self._subnet}.{number}",
                address6=f"fd00:213:{self._subnet}::{number}",
                port=port,
                folder=self.folder / f"node{number}",
                home_size=home_size,
            )
            self.hosts.append(host)
            key = host.folder / "host_key"
            (host.folder / "etc").mkdir(parents=True)
            (host.folder / "home").mkdir()
            public = _new_key(key)
            (host.folder / "sshd_config").write_text(SSHD_CONFIG.format(port=port, key=key))
            for address in (host.address, host.address6):
                known.append(f"{address if port == 22 else f'[{address}]:{port}'} {public}")
        self.known_hosts.write_text("\n".join(known) + "\n")
        for host in self.hosts:
            self._write_etc(host)
        self.boot(*(host.name for host in self.hosts))

    def _lay_cable(self, switch: int) -> None:
        """Connect this machine to the bridge, on the first free subnet."""
        own = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{switch}/ns/net").readlink() == own:
            time.sleep(0.001)
        for subnet in range(256):
            link = f"link add dtrain{subnet} type veth peer name uplink netns {switch}"
            # The name is the lock: a second `add` fails.
            done = subprocess.run(
                ["ip", *link.split()], capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                self._subnet, self._cable = subnet, f"dtrain{subnet}"
                break
            if "File exists" not in done.stderr:
                raise ClusterError(f"no virtual network interface: {done.stderr.strip()}")
        else:
            raise ClusterError("every subnet from 10.213.0.0/24 is in use")
        bridge = ["link add br0 type bridge mcast_snooping 0", "link set br0 up",
                  "link set uplink master br0 up"]  # fmt: skip
        run_script([*self._in_switch(), "ip", "-batch", "-"], "\n".join(bridge))
        here = [
            f"addr add {self.gateway}/24 dev {self._cable}",
            f"addr add fd00:213:{subnet}::fe/64 dev {self._cable} nodad",
            f"link set {self._cable} up",
        ]
        run_script(["ip", "-batch", "-"], "\n".join(here))

    def _write_etc(self, host: Host) -> None:
        etc = host.folder / "etc"
        names = [f"{peer.address} {peer.name}" for peer in self.hosts if peer is not host]
        lines = ["127.0.0.1 localhost", "::1 localhost", f"127.0.1.1 {host.name}", *names]
        (etc / "hosts").write_text("\n".join(lines) + "\n")
        (etc / "resolv.conf").write_text("# no name server: only /etc/hosts\n")
        home = host.folder / "home"
        accounts = [entry for entry in pwd.getpwall() if entry.pw_name not in ("root", USER)]
        uid = max((entry.pw_uid for entry in accounts if entry.pw_uid < 60000), default=0) + 1000
        passwd = [
            f"root:x:0:0:root:{home}/root:/bin/bash",
            f"{USER}:x:{uid}:{uid}::{home}/{USER}:/bin/bash",
        ]
        passwd += [
            f"{entry.pw_name}:x:{entry.pw_uid}:{entry.pw_gid}::{entry.pw_dir}:{entry.pw_shell}"
            for entry in accounts
        ]
        (etc / "passwd").write_text("\n".join(passwd) + "\n")
        (etc / "shadow").write_text(f"root:*:19000:0:99999:7:::\n{USER}:*:19000:0:99999:7:::\n")
        (etc / "shadow").chmod(0o600)
        group = Path("/etc/group").read_text()
        (etc / "group").write_text(group + f"{USER}:x:{uid}:\n")


def _check_machine() -> None:
    if os.geteuid() != 0:
        raise ClusterError("hosts are network namespaces, which need root: run this with sudo")
    programs = {
        "ip": "iproute2", "nft": "nftables", "ssh-keygen": "openssh-client",
        "/usr/sbin/sshd": "openssh-server", "unshare": "util-linux", "hostname": "hostname",
    }  # fmt: skip
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [package for name, package in programs.items() if not shutil.which(name, path=path)]
    if missing:
        raise ClusterError(
            f"install {', '.join(missing)} first: apt-get install {' '.join(missing)}"
        )


def _make_room_for_neighbors(count: int) -> None:
    """Raise the size of the neighbor table, which all namespaces share. With the default of 1024
    entries it overflows when 32 hosts dial each other, and packets get lost."""
    for family in ("ipv4", "ipv6"):
        setting = Path(f"/proc/sys/net/{family}/neigh/default/gc_thresh3")
        with contextlib.suppress(OSError):
            if int(setting.read_text()) < 2 * count * count:
                setting.write_text(str(2 * count * count))


def _new_key(path: Path) -> str:
    """Write a key pair without a passphrase. Returns the public key."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return path.with_suffix(".pub").read_text().strip()


def _identity(pid: int) -> str:
    """A permanent identifier of one process: its pid and start time."""
    started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{pid} {started}"


def _owner(folder: Path) -> int:
    """The process that owns a cluster's folder; 0 if it has ended."""
    try:
        owner = (folder / "owner").read_text()
        pid = int(owner.split()[0])
        return pid if _identity(pid) == owner else 0
    except (OSError, IndexError, ValueError):
        return 0


def _sweep() -> None:
    """Remove the folders of crashed clusters."""
    for folder in STATE.glob(f"{PREFIX}*"):
        # A new folder has no owner yet: keep it for a minute.
        with contextlib.suppress(OSError):
            if not _owner(folder) and time.time() - folder.stat().st_mtime > 60:
                with (folder / "owner").open("a") as owner:
                    fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)


def keep(count: int, port: int, home_size: str) -> None:
    """Hold a cluster until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with Cluster(count, port=port, home_size=home_size) as cluster:
        (cluster.folder / "kept").write_text(CHECKOUT)
        script = Path(__file__).resolve().parent / "recipes" / "train_lm.py"
        file = {
            "cluster": cluster.section(hosts=[f"node[1-{count}]"]),
            "job": {
                "framework": "torch",
                "script": str(script),
                "args": ["--steps", "100"],
                # All hosts share the cores of this machine: with more threads, they wait for them.
                "env": {"OMP_NUM_THREADS": 1},
            },
        }
        text = yaml.safe_dump(file, sort_keys=False, default_flow_style=None, width=1000)
        print(text, end="", flush=True)
        # A reader of the pipe now sees the end of the file.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        while True:
            signal.pause()


def up(arguments: argparse.Namespace) -> int:
    """Start a keeper in the background and print its cluster file."""
    options = ["--port", str(arguments.port), "--home-size", arguments.home_size]
    keeper = subprocess.Popen(
        [sys.executable, __file__, "keep", str(arguments.count), *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert keeper.stdout
    text = keeper.stdout.read().decode()
    print(text, end="")
    return 0 if text else keeper.wait()


def kept(folder: str) -> dict[Path, int]:
    """The folders of the kept clusters that run, each with its owner: ``folder``, or those of this
    checkout if it is empty."""
    found = {}
    for one in STATE.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            checkout = (one / "kept").read_text()
            wanted = one == Path(folder).absolute() if folder else checkout == CHECKOUT
            if wanted and (owner := _owner(one)):
                found[one] = owner
    return found


def down(folder: str) -> int:
    """Stop `kept` clusters and wait until they have ended."""
    found = kept(folder)
    if folder and not found:
        raise ClusterError(f"no cluster that `up` started runs in {folder}")
    for one, owner in found.items():
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner, signal.SIGTERM)
        while _owner(one):
            time.sleep(0.05)
        print(f"stopped the cluster in {one}", file=sys.stderr)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (("up", "start hosts and print a cluster file"), ("keep", "up, in front")):
        command = verbs.add_parser(verb, help=text)
        command.add_argument("count", type=int, help="how many hosts")
        command.add_argument("--port", type=int, default=22, help="where sshd listens")
        command.add_argument("--home-size", default="", help="size of the home disks, e.g. 16M")
    stop = verbs.add_parser("down", help="stop clusters that `up` started")
    stop.add_argument("folder", nargs="?", default="", help="of one; default: all of this checkout")
    arguments = parser.parse_args()
    try:
        if arguments.verb == "up":
            return up(arguments)
        if arguments.verb == "down":
            return down(arguments.folder)
        keep(arguments.count, arguments.port, arguments.home_size)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
