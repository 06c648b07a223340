"""A real OpenSSH sshd on a loopback port, for tests that reach hosts by SSH.

    sshd = start_sshd(tmp_path)              # also: with running_sshd(tmp_path) as sshd: ...
    sshd.port, sshd.user                     # address and account (this user)
    sshd.identity                            # private key that it accepts
    sshd.known_hosts                         # known_hosts file with its host key
    sshd.config_text                         # its sshd_config
    sshd.log()                               # what it has logged so far
    host_on(sshd, "gpu01")                   # a Host for a transport
    sshd.stop()                              # ends it and every session on it

Options of `start_sshd`, all optional:

- ``address``: where it listens (``127.0.0.1``; ``::1`` for IPv6).
- ``settings``: more lines of sshd_config, ``{"MaxStartups": "3:100:10"}``.
- ``host_key_types``: ``("ed25519",)``; several give it several host keys.
- ``identity``: use this existing key instead of a new one (several sshds, one key).
- ``name``: folder name under ``tmp_path``, for several in one test.
- ``namespace``: run it in this network namespace (``ip netns exec``).
- ``pam``: its PAM stack, the text of a file of /etc/pam.d. Needs root, for a mount namespace.
- ``etc``: a folder that it sees as /etc/ssh. Needs root, too.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain.spec.model import Host, Ssh
from support.limits import HANG
from support.ports import free_port

START_TIMEOUT = HANG


@dataclass
class Sshd:
    """A running server."""

    address: str
    port: int
    user: str
    folder: Path
    identity: Path
    known_hosts: Path
    authorized_keys: Path
    config_text: str
    process: subprocess.Popen[bytes]
    _log: bytearray = field(default_factory=bytearray)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _ended: bool = False

    def host_key(self, kind: str = "ed25519") -> str:
        """Its public host key, as ``type base64``."""
        return " ".join((self.folder / f"host_{kind}.pub").read_text().split()[:2])

    def log(self) -> str:
        with self._changed:
            return self._log.decode(errors="replace")

    def wait_for_log(self, pattern: str, timeout: float = START_TIMEOUT) -> str:
        """Wait for the first match of ``pattern`` in the log."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: re.search(pattern, self._log.decode(errors="replace")) or self._ended,
                timeout,
            )
        match = re.search(pattern, self.log())
        assert match, f"sshd never logged {pattern!r} ({found}):\n{self.log()}"
        return match[0]

    def stop(self) -> None:
        """End the server and its sessions. Safe to call twice."""
        self.end_sessions()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end_sessions(self) -> None:
        # What has stopped cannot fork a process that is then missed.
        stopped: set[int] = set()
        while running := set(_descendants(self.process.pid)) - stopped:
            _signal(running, signal.SIGSTOP)
            stopped |= running
        _signal(stopped, signal.SIGKILL)

    def _follow(self) -> None:
        assert self.process.stderr
        with self.process.stderr as stream:
            while data := os.read(stream.fileno(), 1 << 16):
                with self._changed:
                    self._log += data
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _signal(processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def start_sshd(
    tmp_path: Path,
    *,
    address: str = "127.0.0.1",
    settings: Mapping[str, str] | None = None,
    host_key_types: tuple[str, ...] = ("ed25519",),
    identity: Path | None = None,
    name: str = "sshd",
    namespace: str | None = None,
    pam: str | None = None,
    etc: Path | None = None,
    port: int | None = None,
) -> Sshd:
    """Start a server and return once it listens; see the module for the options."""
    binary = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/sbin:/usr/local/sbin")
    if not binary:
        raise RuntimeError("these tests need OpenSSH's server: install openssh-server")
    if os.getuid() == 0:
        # sshd's unprivileged child lives in this folder; a service script would make it.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    folder = (tmp_path / name).resolve()
    folder.mkdir(parents=True)
    for kind in host_key_types:
        generate_key(folder / f"host_{kind}", kind)
    if identity is None:
        identity = generate_key(folder / "identity")
    authorized_keys = folder / "authorized_keys"
    authorized_keys.write_text(Path(f"{identity}.pub").read_text())
    authorized_keys.chmod(0o600)
    user = getpass.getuser()
    for _ in range(10):
        listen = port or free_port(address)
        bracketed = f"[{address}]" if ":" in address else address
        # Its name for a setting counts from the first line on, so the test's come first.
        lines = [f"{key} {value}" for key, value in (settings or {}).items()]
        lines += [
            f"Port {listen}",
            f"ListenAddress {bracketed}",
            *(f"HostKey {folder}/host_{kind}" for kind in host_key_types),
            f"AuthorizedKeysFile {authorized_keys}",
            f"PidFile {folder}/pid",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin yes",
            "PrintMotd no",
            # Debian's bash reads ~/.bashrc when sshd starts it, unless it is a nested shell:
            # the account's own settings must not matter (and may take long).
            "SetEnv SHLVL=2",
            "LogLevel VERBOSE",
        ]
        config_text = "\n".join(lines) + "\n"
        (folder / "sshd_config").write_text(config_text)
        process = subprocess.Popen(
            [
                *(["ip", "netns", "exec", namespace] if namespace else []),
                *(_with_pam(folder, pam) if pam else []),
                *(mounted(etc, "/etc/ssh") if etc else []),
                binary,
                "-D",
                "-e",
                "-f",
                str(folder / "sshd_config"),
            ],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        known_hosts = folder / "known_hosts"
        sshd = Sshd(
            address,
            listen,
            user,
            folder,
            identity,
            known_hosts,
            authorized_keys,
            config_text,
            process,
        )
        threading.Thread(target=sshd._follow, daemon=True).start()
        known_hosts.write_text(
            "".join(f"[{address}]:{listen} {sshd.host_key(kind)}\n" for kind in host_key_types)
        )
        try:
            sshd.wait_for_log(r"Server listening on")
        except AssertionError:
            sshd.stop()
            if "Address already in use" in sshd.log() and port is None:
                continue  # Another process took the port in between.
            raise
        return sshd
    raise RuntimeError("no free port for sshd")


def _with_pam(folder: Path, stack: str) -> list[str]:
    """A command prefix that gives only sshd another /etc/pam.d."""
    (folder / "pam.d").mkdir(exist_ok=True)
    (folder / "pam.d" / "sshd").write_text(stack)
    return mounted(folder / "pam.d", "/etc/pam.d")


def mounted(folder: Path, place: str) -> list[str]:
    """A command prefix: the command sees ``folder`` at ``place``, a folder."""
    script = f'mount --bind "$0" {place} && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, str(folder)]


@contextmanager
def running_sshd(tmp_path: Path, **options: object) -> Iterator[Sshd]:
    """`start_sshd` that ends with the block."""
    sshd = start_sshd(tmp_path, **options)  # type: ignore[arg-type]
    try:
        yield sshd
    finally:
        sshd.stop()


def host_on(sshd: Sshd, name: str = "gpu01", **ssh: Any) -> Host:
    """A host of a cluster file that is reached on this server; ``ssh`` overrides its settings."""
    settings: dict[str, Any] = {
        "user": sshd.user,
        "port": sshd.port,
        "identity": str(sshd.identity),
        "known_hosts": str(sshd.known_hosts),
        **ssh,
    }
    return Host(name, sshd.address, ssh=Ssh(**settings))


def generate_key(
    path: Path, kind: str = "ed25519", passphrase: str = "", comment: str = ""
) -> Path:
    """Make a key pair with ssh-keygen; returns ``path``, the private half."""
    command = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", comment, "-f", str(path)]
    if kind == "rsa":
        command += ["-b", "2048"]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return path


def _descendants(pid: int) -> list[int]:
    """Every descendant of ``pid``, in any session."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found
