"""One host of a local cluster: a set of Linux namespaces under one small init."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

USER = "ml"
"""An unprivileged account on every host, with the same key as root."""

# PID 1 of a host. It prints its pid, waits for its cable, sets up the host, and ends when its owner
# closes stdin. bash adopts and reaps detached processes.
INIT = r"""
set -e
read -r pid _ </proc/self/stat
echo "$pid"
read -r go
mount -t proc proc /proc
mkdir -p "$STATE/cgroup"
mount --rbind /sys/fs/cgroup "$STATE/cgroup"
mount -t sysfs sysfs /sys 2>/dev/null || true
mount --move "$STATE/cgroup" /sys/fs/cgroup  # for container engines
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


class ClusterError(Exception):
    """This machine cannot create the cluster. The message has the reason and the remedy."""


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
        """The MAC address of its network card."""
        return f"02:00:00:00:00:{int(self.address.rpartition('.')[2]):02x}"

    @property
    def home(self) -> Path:
        """root's home folder on that host, as a path that works on this machine."""
        path = self.folder / "home" / "root"
        return Path(f"/proc/{self.pid}/root{path}") if self.home_size else path

    def command(self, *argv: str) -> list[str]:
        """A command that runs ``argv`` on the host (as root, in its home folder) without SSH."""
        home = f"{self.folder}/home/root"
        enter = ["nsenter", "-t", str(self.pid), "--net", "--uts", "--mount", "--ipc", "--pid"]
        return [*enter, "env", "-C", home, f"HOME={home}", *argv]

    def run(self, *argv: str, timeout: float = 300) -> str:
        """The stdout of ``argv`` run on the host. Raises CalledProcessError."""
        done = subprocess.run(
            self.command(*argv), check=True, capture_output=True, text=True, timeout=timeout
        )
        return done.stdout

    def processes(self) -> dict[int, str]:
        """The processes on the host, by pid on this machine, without sshd and the host's init."""
        found: dict[int, str] = {}
        if not self.pid:
            return found
        mine = Path(f"/proc/{self.pid}/ns/pid").readlink()
        for entry in Path("/proc").iterdir():
            # Skip processes that end during the scan.
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
        """SIGKILL all processes that were started on the host. The host stays up."""
        while found := self.processes():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def stop_sshd(self) -> None:
        """Kill sshd and all its sessions. Processes that they started continue."""
        self.run("pkill", "-KILL", "sshd")

    def start_sshd(self) -> None:
        """Start a new sshd after `stop_sshd`."""
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
        run_script(["nsenter", "-t", str(self.pid), "--net", "nft", "-f", "-"], "\n".join(script))

    def spawn(self, key: Path) -> None:
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

    def read_pid(self) -> None:
        assert self._init and self._init.stdout
        line = self._init.stdout.readline().strip()
        if not line:
            output = (self.folder / "init.log").read_text(errors="replace").strip()
            raise ClusterError(f"{self.name} did not start: {output}")
        self.pid = int(line)

    def go(self) -> None:
        assert self._init and self._init.stdin
        self._init.stdin.write(b"go\n")
        self._init.stdin.flush()

    def wait_for_sshd(self, deadline: float) -> None:
        while True:
            try:
                socket.create_connection((self.address, self.port), timeout=1).close()
                return
            except OSError as error:
                assert self._init
                if self._init.poll() is not None or time.monotonic() > deadline:
                    logs = [self.folder / "init.log", self.folder / "sshd.log"]
                    output = "\n".join(log.read_text() for log in logs if log.exists())
                    raise ClusterError(f"{self.name}: no sshd ({error})\n{output}") from None
                time.sleep(0.01)

    def halt(self) -> None:
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


def run_script(argv: Sequence[str], script: str) -> None:
    done = subprocess.run(argv, input=script, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"{shlex.join(argv)}: {done.stderr.strip()}")
