"""What the kernel says while a job runs: memory that ran out, disks and GPUs that failed."""

from __future__ import annotations

import os
import re
import time

from dtrain.node.agent.processes import read_file
from dtrain.node.agent.sweep import Tag
from dtrain.node.agent.wire import shown

TROUBLE = re.compile(
    rb"NVRM: Xid|[Kk]ill(?:ed)? process \d|I/O error|EXT4-fs error|XFS \(.*(?:orruption|hutting)"
)
"""Lines of the kernel's log that the launcher may want; `failures/kernel.yaml` knows them."""
MAX_RECORDS, MAX_LINES, MAX_LINE = 1 << 16, 50, 500
RECORD = re.compile(rb"\d+,\d+,(\d+),[^;]*;(.*)")
"""One of the kernel's own: priority, number, microseconds since the boot, flags; message."""
ENTRY = re.compile(rb"(\d+\.\d+) \S+ kernel: (.*)")
"""One of the journal's: seconds since the epoch, host, message."""
JOURNAL_LIMIT = 2.0
"""Seconds for journalctl to answer."""
JOURNAL_LINES = 2000
"""The latest ones, that it is asked for."""
NO_RUN = Tag("none", "none", b"none")
"""For a helper of ours, which the sweep that ends a run's processes leaves alone."""


def oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory: in our cgroup if it can be
    told, on this host otherwise."""
    for line in (read_file("/proc/self/cgroup") or b"").splitlines():
        if line.startswith(b"0::"):
            path = b"/sys/fs/cgroup" + line[3:] + b"/memory.events"
            counted = read_file(path)
            if counted is not None:
                break
    else:
        counted = read_file("/proc/vmstat")
    for line in (counted or read_file("/proc/vmstat") or b"").splitlines():
        if line.startswith(b"oom_kill "):
            return int(line.split()[1])
    return 0


class KernelLog:
    """What the kernel says of trouble from now on, where this user may read it."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._since = time.time()
        self._told: set[tuple[float, bytes]] = set()
        self._journal = True
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self._fd = -1

    def read(self) -> list[tuple[float, str]]:
        """The lines that matter and are new since the last call, the latest ones if they are many,
        each with its time (seconds since the epoch)."""
        lines = self._records() if self._fd >= 0 else self._entries()
        found = [(then, line) for then, line in lines if TROUBLE.search(line, 0, MAX_LINE)]
        fresh = [line for line in found if line not in self._told]
        self._told.update(fresh)
        return [(then, shown(line[:MAX_LINE])) for then, line in fresh[-MAX_LINES:]]

    def _records(self) -> list[tuple[float, bytes]]:
        # The kernel's stamps know nothing of the corrections that time servers make.
        now = time.time()
        booted = now - time.clock_gettime(time.CLOCK_MONOTONIC_RAW)
        found = []
        for _ in range(MAX_RECORDS):
            try:
                data = os.read(self._fd, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            except OSError:
                break
            if not data:
                break
            # Lines with details, which begin with a space, are none.
            records = filter(None, map(RECORD.match, data.splitlines()))
            found += [(min(now, booted + int(record[1]) / 1e6), record[2]) for record in records]
        return found

    def _entries(self) -> list[tuple[float, bytes]]:
        """By systemd, which lets administrators read what the kernel itself keeps from them."""
        import subprocess

        if not self._journal:
            return []
        command = ["journalctl", "-k", "-q", "-o", "short-unix", "--no-pager", "--since"]
        # Backwards, because older ones take the first lines since that time.
        command += ["@%d" % self._since, "-r", "-n", str(JOURNAL_LINES)]
        environment = {**os.environb, **NO_RUN.environment}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, timeout=JOURNAL_LIMIT
            )
        except OSError:  # there is none
            self._journal = False
            return []
        except subprocess.SubprocessError:
            return []
        entries = filter(None, map(ENTRY.match, reversed(done.stdout.splitlines())))
        return [(float(entry[1]), entry[2]) for entry in entries]
