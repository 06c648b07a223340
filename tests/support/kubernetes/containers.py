"""One container: a process with its own root folder, host name and processes.

There is no image. The container sees this machine's programs and the Python environment of the
tests, and nothing else of this machine's files.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from namespace_host import Host
from support.kubernetes.logs import Log

PATH = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
IMAGE = sorted({"/usr", "/sys", sys.prefix, sys.base_prefix})
NOT_FOUND = 128
"""The status of a container whose program does not exist."""

_ROOT = r"""
set -e
read -r pid _ </proc/self/stat
hostname "$NAME"
mount -t tmpfs -o mode=755 tmpfs "$ROOT"
cd "$ROOT"
mkdir proc dev dev/pts dev/shm tmp var var/tmp run root home mnt opt srv
chmod 1777 tmp var/tmp
for part in bin sbin lib lib32 lib64; do
  if [ -L "/$part" ]; then cp -a "/$part" .
  elif [ -d "/$part" ]; then mkdir "$part"; mount --rbind "/$part" "$part"
  fi
done
cp -a /etc etc
for part in $PARTS; do mkdir -p ".$part"; mount --rbind "$part" ".$part"; done
mount -t proc proc proc
mount -t tmpfs -o mode=1777 tmpfs dev/shm
for device in null zero full random urandom tty; do
  touch "dev/$device"; mount --bind "/dev/$device" "dev/$device"
done
ln -s /proc/self/fd dev/fd; ln -s fd/0 dev/stdin; ln -s fd/1 dev/stdout; ln -s fd/2 dev/stderr
touch etc/hosts etc/resolv.conf dev/termination-log
mount --bind "$HOSTS" etc/hosts
echo >etc/resolv.conf
mount --bind "$MESSAGE" dev/termination-log
"""
_FIND = r"""
if ! chroot "$ROOT" /bin/bash -c 'PATH=$1; command -v -- "$2"' - "$PATH_GIVEN" "$1" >/dev/null; then
  echo "$pid missing" >&{said}
  exit {status}
fi
"""
_INTERNAL = ("PATH_GIVEN", "PWD", "SHLVL", "OLDPWD", "_")
_ENV = "/usr/bin/env"


@dataclass
class Settings:
    """How a container starts."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    hosts: Path
    message: Path
    """What the container writes to /dev/termination-log."""
    mounts: list[tuple[str, Path | None, bool]] = field(default_factory=list)
    folder: str = "/"
    user: int = 0
    group: int = 0
    path: str = PATH


class Container:
    """Runs from its creation on. ``pid`` is its first process, as this machine sees it."""

    def __init__(self, host: Host, root: Path, settings: Settings, log: Log) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.log = log
        self.program = settings.argv[0]
        known, said = os.pipe()
        enter = ["/usr/bin/nsenter", "-t", str(host.pid), "--net", "--ipc", "--pid"]
        unshare = ["/usr/bin/unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child"]
        script = _script(root, settings, said)
        self._errors = root.with_name(f"{root.name}.errors")
        defaults = {"PATH": settings.path, "HOME": "/root", "HOSTNAME": settings.name}
        self._settings = settings
        self._environment = {**defaults, **settings.environment}
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [*enter, *unshare, "/bin/bash", "-c", script, "container", *settings.argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=self._environment,
                pass_fds=[said],
                start_new_session=True,
            )
        os.close(said)
        with open(known, "rb") as pipe:
            # Not to its end: the processes around the container keep the pipe open.
            pid, _, state = pipe.readline().decode().strip().partition(" ")
        self.pid = int(pid or 0)
        self.missing = state == "missing"
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def start(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start another program in the container, once it has its own root folder."""
        here = os.stat("/").st_dev
        with contextlib.suppress(OSError):  # it has ended
            while os.stat(f"/proc/{self.pid}/root").st_dev == here:
                time.sleep(0.01)
        enter = ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "--root", "--wd"]
        owner = ["-S", str(self._settings.user), "-G", str(self._settings.group)]
        return subprocess.Popen(
            [*enter, *owner, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
        )

    def _read(self) -> None:
        assert self._process.stdout
        with self._process.stdout as pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                self.log.feed(data)
        if not self.pid:
            self.log.feed(self._errors.read_bytes())
        self.log.end()

    def wait(self) -> int:
        """The exit status, after all of the output; 128 and the number of a signal."""
        status = self._process.wait()
        self._reader.join()
        if b"sigprocmask unblock failed" in self._errors.read_bytes():
            return 137  # unshare cannot end itself by the KILL that ended its child
        return status if status >= 0 else 128 - status

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None and self.pid:
                os.kill(self.pid, number)


def _script(root: Path, settings: Settings, said: int) -> str:
    """For bash, which then becomes the container's program."""
    values = {
        "NAME": settings.name,
        "ROOT": str(root),
        "PARTS": " ".join(IMAGE),
        "HOSTS": str(settings.hosts),
        "MESSAGE": str(settings.message),
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    # The container's own PATH and variables are for its program alone.
    lines = ["PATH_GIVEN=$PATH PATH=/usr/sbin:/usr/bin:/sbin:/bin", *lines, _ROOT]
    for where, source, read_only in settings.mounts:
        inside = shlex.quote(f".{where}")
        if source is None:
            lines += [f"mkdir -p {inside}", f"mount -t tmpfs -o mode=1777 tmpfs {inside}"]
            continue
        made = "mkdir -p" if source.is_dir() else 'mkdir -p "$(dirname {0})"; touch'
        lines.append(f"{made.format(inside)} {inside}")
        lines.append(f"mount --rbind {shlex.quote(str(source))} {inside}")
        if read_only:
            lines.append(f"mount -o remount,bind,ro {inside}")
    hidden = " ".join(f"-u {name}" for name in (*values, *_INTERNAL))
    environment = settings.environment
    kept = shlex.join([f"{name}={environment[name]}" for name in values if name in environment])
    folder = shlex.quote(settings.folder)
    owner = f"--groups= --userspec={settings.user}:{settings.group}"
    lines += [
        f"mkdir -p .{folder}",
        _FIND.format(said=said, status=NOT_FOUND),
        f'echo "$pid" >&{said}',
        f"exec {said}>&- 2>&1",
        f'exec chroot {owner} "$ROOT" {_ENV} -C {folder} {hidden} PATH="$PATH_GIVEN" {kept} "$@"',
    ]
    return "\n".join(lines)
