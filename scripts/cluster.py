#!/usr/bin/env python3
"""A local multi-host cluster: N hosts on this machine, each with its own address, host name,
process list, home folder, sshd and firewall.

    sudo .venv/bin/python scripts/cluster.py up 8   start 8 hosts, print a cluster file for them
    sudo .venv/bin/python scripts/cluster.py down   stop every cluster started this way

A host is a set of Linux namespaces (network, host name, mounts, processes) under one small init.
All hosts hang on a bridge in a network namespace of its own, and one virtual cable leads from
that bridge to this machine, so that a launcher started here reaches them by SSH.

Init lives for as long as whoever made it holds its stdin open. When the owner ends, however it
ends, the kernel takes the processes, the interfaces, the mounts and the firewall away; a folder
under /var/tmp is all that a crash can leave, and the next cluster removes it.

What hosts share: the machine's files (the checkout, the Python), but neither home folders nor
/run, /dev/shm or /etc/hosts. As on Debian, a host's own name leads to 127.0.1.1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

PREFIX = "dtrain-cluster-"
STATE = Path("/var/tmp")  # noqa: S108 - every cluster takes a fresh folder with mkdtemp
USER = "ml"
"""An account without privileges on every host, beside root; same key."""

# PID 1 of a host. It announces itself, waits for its cable, becomes the host, and ends when its
# owner closes stdin. bash adopts and reaps what detached processes leave behind.
INIT = r"""
set -e
read -r pid _ </proc/self/stat
echo "$pid"
read -r go
mount -t proc proc /proc
mount -t sysfs sysfs /sys 2>/dev/null || true
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -m 755 /run/sshd
[ ! -d /dev/shm ] || mount -t tmpfs -o mode=1777 tmpfs /dev/shm
for name in hosts passwd shadow group resolv.conf; do
  [ ! -e "/etc/$name" ] || mount --bind "$STATE/etc/$name" "/etc/$name"
done
[ -z "$HOME_SIZE" ] || mount -t tmpfs -o "mode=755,size=$HOME_SIZE" tmpfs "$STATE/home"
for home in root "$ACCOUNT"; do
  install -d -m 755 -o "$home" "$STATE/home/$home"
  install -d -m 700 -o "$home" "$STATE/home/$home/.ssh"
  install -m 600 -o "$home" "$KEY.pub" "$STATE/home/$home/.ssh/authorized_keys"
done
hostname "$NAME"
printf '%s\n' "link set lo up" "addr add $IPV4/24 dev eth0" \
  "addr add $IPV6/64 dev eth0 nodad" "link set eth0 up" | ip -batch -
env -i PATH="$PATH" /usr/sbin/sshd -D -f "$STATE/sshd_config" -E "$STATE/sshd.log" </dev/null &
set +e
read -r end
"""

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


class ClusterError(Exception):
    """The cluster cannot be made on this machine; says why and what to do."""


@dataclass
class Host:
    """One host. ``pid`` is its init as this machine sees it, 0 while it is off."""

    name: str
    address: str
    address6: str
    port: int
    folder: Path
    """State of this host on this machine: ``home/``, ``etc/``, ``sshd.log``."""
    home_size: str = ""
    pid: int = 0
    _init: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def mac(self) -> str:
        """Its network card."""
        return f"02:00:00:00:00:{int(self.address.rpartition('.')[2]):02x}"

    @property
    def home(self) -> Path:
        """root's home folder on that host, as a path that works on this machine."""
        path = self.folder / "home" / "root"
        return Path(f"/proc/{self.pid}/root{path}") if self.home_size else path

    def command(self, *argv: str) -> list[str]:
        """What runs ``argv`` on the host (as root, in its home folder) without SSH."""
        home = f"{self.folder}/home/root"
        enter = ["nsenter", "-t", str(self.pid), "--net", "--uts", "--mount", "--ipc", "--pid"]
        return [*enter, "env", "-C", home, f"HOME={home}", *argv]

    def run(self, *argv: str, timeout: float = 30) -> str:
        """The stdout of ``argv`` run on the host. Raises CalledProcessError."""
        done = subprocess.run(
            self.command(*argv), check=True, capture_output=True, text=True, timeout=timeout
        )
        return done.stdout

    def processes(self) -> dict[int, str]:
        """What runs on the host, by pid on this machine; sshd and the host's init left out."""
        found: dict[int, str] = {}
        if not self.pid:
            return found
        mine = Path(f"/proc/{self.pid}/ns/pid").readlink()
        for entry in Path("/proc").iterdir():
            # What ends while it is being looked at is not there.
            with contextlib.suppress(OSError):
                if not entry.name.isdigit() or (entry / "ns" / "pid").readlink() != mine:
                    continue
                name = (entry / "comm").read_text().strip()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                # A zombie has no command line.
                if command and int(entry.name) != self.pid and not name.startswith("sshd"):
                    found[int(entry.name)] = command.decode(errors="replace").strip()
        return found

    def kill_all(self) -> None:
        """SIGKILL everything that was started on the host; the host stays up."""
        while found := self.processes():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def stop_sshd(self) -> None:
        """Kill sshd with all its sessions; what they had started goes on."""
        self.run("pkill", "-KILL", "sshd")

    def start_sshd(self) -> None:
        """Start an sshd in place of one that was stopped."""
        config, log = self.folder / "sshd_config", self.folder / "sshd.log"
        self.run("/usr/sbin/sshd", "-f", str(config), "-E", str(log))

    def firewall(self, *rules: str) -> None:
        """Replace the host's rules: each is an nft match and verdict, for both directions."""
        script = ["table inet dtrain", "delete table inet dtrain"]
        if rules:
            chains = [
                f"chain {way} {{ type filter hook {way} priority 0; {device} lo accept;"
                f" {'; '.join(rules)}; }}"
                for way, device in (("input", "iifname"), ("output", "oifname"))
            ]
            script += ["table inet dtrain {", *chains, "}"]
        _run(["nsenter", "-t", str(self.pid), "--net", "nft", "-f", "-"], "\n".join(script))

    def _spawn(self, key: Path) -> None:
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "NAME": self.name,
            "IPV4": self.address,
            "IPV6": self.address6,
            "STATE": str(self.folder),
            "KEY": str(key),
            "ACCOUNT": USER,
            "HOME_SIZE": self.home_size,
        }
        with (self.folder / "init.log").open("ab") as log:
            self._init = subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork",
                 "--kill-child", "bash", "-c", INIT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )  # fmt: skip

    def _read_pid(self) -> None:
        assert self._init and self._init.stdout
        line = self._init.stdout.readline().strip()
        if not line:
            said = (self.folder / "init.log").read_text(errors="replace").strip()
            raise ClusterError(f"{self.name} did not start: {said}")
        self.pid = int(line)

    def _go(self) -> None:
        assert self._init and self._init.stdin
        self._init.stdin.write(b"go\n")
        self._init.stdin.flush()

    def _wait_for_sshd(self, deadline: float) -> None:
        while True:
            try:
                socket.create_connection((self.address, self.port), timeout=1).close()
                return
            except OSError as error:
                assert self._init
                if self._init.poll() is not None or time.monotonic() > deadline:
                    logs = [self.folder / "init.log", self.folder / "sshd.log"]
                    said = "\n".join(log.read_text() for log in logs if log.exists())
                    raise ClusterError(f"{self.name}: no sshd ({error})\n{said}") from None
                time.sleep(0.01)

    def _halt(self) -> None:
        if self._init is None:
            return
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._init.kill()
        self._init.wait()
        for pipe in (self._init.stdin, self._init.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._init, self.pid = None, 0


class Cluster:
    """Hosts ``node1`` to ``nodeN``, up between ``with`` and its end.

    ``home_size`` (``"16M"``) puts the home folders on a disk of that size. Needs root. Raises
    ClusterError when the machine lacks something.
    """

    def __init__(self, count: int, *, port: int = 22, home_size: str = "") -> None:
        if not 1 <= count <= 200:
            raise ClusterError(f"{count} hosts: between 1 and 200 are possible")
        _check_machine()
        _make_room_for_neighbors(count)
        _sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=STATE))
        self.folder.chmod(0o755)
        (self.folder / "owner").write_text(_identity(os.getpid()))
        self.identity = self.folder / "identity"
        self.known_hosts = self.folder / "known_hosts"
        self.hosts: list[Host] = []
        self._switch: subprocess.Popen[bytes] | None = None
        self._subnet = 0
        try:
            self._start(count, port, home_size)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    @property
    def gateway(self) -> str:
        """This machine's address among the hosts."""
        return f"10.213.{self._subnet}.254"

    def section(self, **overrides: object) -> dict[str, object]:
        """The ``cluster`` section of a cluster file for these hosts.

        One CPU worker on each host, started by the Python that runs this; ``overrides``
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
        """An ``ssh`` command line to which a command can be appended."""
        return [
            "ssh", "-F", "none", "-p", str(host.port), "-i", str(self.identity),
            "-o", f"UserKnownHostsFile={self.known_hosts}", "-o", "BatchMode=yes",
            "-o", "IdentitiesOnly=yes", f"{user}@{host.address}",
        ]  # fmt: skip

    def cut(self, name: str) -> None:
        """Drop every packet from and to a host, the launching machine's included."""
        self[name].firewall("drop")

    def reset(self, name: str) -> None:
        """Reset every TCP connection from and to a host that sends or gets anything, and refuse
        new ones."""
        self[name].firewall("meta l4proto tcp reject with tcp reset")

    def block(self, name: str, *others: str) -> None:
        """Drop what passes between a host and others (``launcher`` is this machine)."""
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
        """Let everything through again."""
        for host in self.hosts:
            if host.pid:
                host.firewall()

    def power_off(self, name: str) -> None:
        """End a host at once: it does not say good-bye on any connection."""
        self.cut(name)
        self[name]._halt()
        # Its cable goes with its namespace, but only after a while.
        subprocess.run(
            [*self._in_switch(), "ip", "link", "del", name],
            stderr=subprocess.DEVNULL,
            check=False,
        )

    def boot(self, *names: str) -> None:
        """Start hosts that are off, and wait for their sshd."""
        hosts = [self[name] for name in names]
        for host in hosts:
            host._spawn(self.identity)
        for host in hosts:
            host._read_pid()
        assert self._switch
        switch = self._switch.pid
        links = [
            # The same card after a reboot, or its neighbors would look for the old one.
            f"link add eth0 netns {host.pid} address {host.mac}"
            f" type veth peer name {host.name} netns {switch}"
            for host in hosts
        ]
        _run(["ip", "-batch", "-"], "\n".join(links))
        ports = [f"link set {host.name} master br0 up" for host in hosts]
        _run([*self._in_switch(), "ip", "-batch", "-"], "\n".join(ports))
        for host in hosts:
            host._go()
        deadline = time.monotonic() + 15
        for host in hosts:
            host._wait_for_sshd(deadline)

    def close(self) -> None:
        """Stop every host and remove every trace. Safe to call twice."""
        for host in self.hosts:
            host._halt()
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()
            assert self._switch.stdin
            self._switch.stdin.close()
            self._switch = None
            # The kernel takes namespaces apart later; the cable need not wait for that.
            subprocess.run(
                ["ip", "link", "del", self._cable], stderr=subprocess.DEVNULL, check=False
            )
        shutil.rmtree(self.folder, ignore_errors=True)

    def _in_switch(self) -> list[str]:
        assert self._switch
        return ["nsenter", "-t", str(self._switch.pid), "--net"]

    @property
    def _cable(self) -> str:
        return f"dtrain{self._subnet}"

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
        """Connect this machine to the bridge, on the first subnet that no one else took."""
        own = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{switch}/ns/net").readlink() == own:
            time.sleep(0.001)
        for subnet in range(256):
            link = f"link add dtrain{subnet} type veth peer name uplink netns {switch}"
            # The name is the lock: adding it twice is refused.
            done = subprocess.run(
                ["ip", *link.split()], capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                self._subnet = subnet
                break
            if "File exists" not in done.stderr:
                raise ClusterError(f"no virtual network interface: {done.stderr.strip()}")
        else:
            raise ClusterError("every subnet from 10.213.0.0/24 on is in use")
        bridge = ["link add br0 type bridge mcast_snooping 0", "link set br0 up",
                  "link set uplink master br0 up"]  # fmt: skip
        _run([*self._in_switch(), "ip", "-batch", "-"], "\n".join(bridge))
        here = [
            f"addr add {self.gateway}/24 dev {self._cable}",
            f"addr add fd00:213:{subnet}::fe/64 dev {self._cable} nodad",
            f"link set {self._cable} up",
        ]
        _run(["ip", "-batch", "-"], "\n".join(here))

    def _write_etc(self, host: Host) -> None:
        etc = host.folder / "etc"
        names = [f"{peer.address} {peer.name}" for peer in self.hosts if peer is not host]
        lines = ["127.0.0.1 localhost", "::1 localhost", f"127.0.1.1 {host.name}", *names]
        (etc / "hosts").write_text("\n".join(lines) + "\n")
        (etc / "resolv.conf").write_text("# no name server: /etc/hosts is all there is\n")
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
    """All namespaces share one table of who is next to whom, of 1024 entries unless told otherwise:
    from 32 hosts on that dial each other it overflows, and packets get lost."""
    for family in ("ipv4", "ipv6"):
        setting = Path(f"/proc/sys/net/{family}/neigh/default/gc_thresh3")
        with contextlib.suppress(OSError):
            if int(setting.read_text()) < 2 * count * count:
                setting.write_text(str(2 * count * count))


def _run(argv: Sequence[str], script: str) -> None:
    done = subprocess.run(argv, input=script, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"{shlex.join(argv)}: {done.stderr.strip()}")


def _new_key(path: Path) -> str:
    """Write a key pair without passphrase; the public half is returned."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return path.with_suffix(".pub").read_text().strip()


def _identity(pid: int) -> str:
    """Names one process for ever: its pid and when it was started."""
    started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{pid} {started}"


def _owner(folder: Path) -> int:
    """The process that holds a cluster's folder; 0 when it has ended."""
    try:
        owner = (folder / "owner").read_text()
        pid = int(owner.split()[0])
        return pid if _identity(pid) == owner else 0
    except (OSError, IndexError, ValueError):
        return 0


def _sweep() -> None:
    """Remove what crashed clusters left behind."""
    for folder in STATE.glob(f"{PREFIX}*"):
        # A folder that is being made has no owner yet: leave it for a minute.
        with contextlib.suppress(OSError):
            if not _owner(folder) and time.time() - folder.stat().st_mtime > 60:
                shutil.rmtree(folder, ignore_errors=True)


def keep(count: int, port: int, home_size: str) -> None:
    """Hold a cluster until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with Cluster(count, port=port, home_size=home_size) as cluster:
        (cluster.folder / "kept").touch()
        hosts = "".join(f"    {host.name}: {{address: {host.address}}}\n" for host in cluster.hosts)
        print(
            f"cluster:\n"
            f'  hosts: ["node[1-{count}]"]\n'
            f"  gpus: 0\n"
            f"  python: {sys.executable}\n"
            f"  ssh: {{user: root, port: {port}, identity: {cluster.identity},"
            f" known_hosts: {cluster.known_hosts}}}\n"
            f"  overrides:\n{hosts}"
            f"job:\n"
            f"  framework: torch\n"
            f"  script: {Path(__file__).resolve().parent / 'recipes' / 'train_lm.py'}\n"
            f"  args: [--steps, 100]",
            flush=True,
        )
        # Whoever reads the file from a pipe now sees its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        while True:
            signal.pause()


def up(arguments: argparse.Namespace) -> int:
    """Start a keeper in the background and pass on the cluster file that it prints."""
    command = [
        sys.executable,
        __file__,
        "keep",
        str(arguments.count),
        "--port",
        str(arguments.port),
    ]
    command += ["--home-size", arguments.home_size] if arguments.home_size else []
    keeper = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    )
    assert keeper.stdout
    text = keeper.stdout.read().decode()
    print(text, end="")
    return 0 if text else keeper.wait()


def down() -> int:
    """End every kept cluster and wait until it is gone."""
    for folder in STATE.glob(f"{PREFIX}*"):
        owner = _owner(folder)
        if owner and (folder / "kept").exists():
            os.kill(owner, signal.SIGTERM)
            while _owner(folder):
                time.sleep(0.05)
            print(f"stopped the cluster in {folder}", file=sys.stderr)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (("up", "start hosts and print a cluster file"), ("keep", "up, in front")):
        command = verbs.add_parser(verb, help=text)
        command.add_argument("count", type=int, help="how many hosts")
        command.add_argument("--port", type=int, default=22, help="where sshd listens")
        command.add_argument("--home-size", default="", help="size of the home disks, e.g. 16M")
    verbs.add_parser("down", help="stop every cluster that `up` started")
    arguments = parser.parse_args()
    try:
        if arguments.verb == "up":
            return up(arguments)
        if arguments.verb == "down":
            return down()
        keep(arguments.count, arguments.port, arguments.home_size)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
