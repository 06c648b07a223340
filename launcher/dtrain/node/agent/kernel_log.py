"""Kernel log lines of problems while a job runs: OOM kills, failures of disks and GPUs."""

from __future__ import annotations

import os
import re
import time

from dtrain.node.agent.sweep import HELPERS, start_helper
from dtrain.node.agent.wire import shown
from dtrain.node.files import read_file

# Texts, which Python compiles on first use: few jobs need them, and each start would pay.
TROUBLE = (
    rb"NVRM: Xid|[Kk]ill(?:ed)? process \d|I/O error|EXT4-fs error|XFS \(.*(?:orruption|hutting)"
)
"""Lines that the launcher may need; `failures/kernel.yaml` explains them."""
MAX_RECORDS, MAX_LINES, MAX_LINE = 1 << 16, 50, 500
RECORD = rb"\d+,\d+,(\d+),[^;]*;(.*)"
"""A record of /dev/kmsg: priority, number, microseconds since the boot, flags; message."""
ENTRY = rb"(\d+\.\d+) \S+ kernel: (.*)"
"""A line of journalctl: seconds since the epoch, host, message."""
JOURNAL_LIMIT = 2.0
"""Seconds for journalctl to answer."""
JOURNAL_LINES = 2000
"""The number of latest lines to read."""


def oom_kills(elsewhere: bool) -> int:
    """The number of OOM kills in our cgroup, or on this host if the cgroup has no counter or the
    workers are ``elsewhere``: a container has a cgroup of its own."""
    own = b"" if elsewhere else read_file("/proc/self/cgroup") or b""
    counted = None
    for line in own.splitlines():
        if line.startswith(b"0::"):
            counted = read_file(b"/sys/fs/cgroup" + line[3:] + b"/memory.events")
    for line in (counted or read_file("/proc/vmstat") or b"").splitlines():
        if line.startswith(b"oom_kill "):
            return int(line.split()[1])
    return 0


class KernelLog:
    """The problems that the kernel logs from now on, if this user may read its log."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._since = time.time()
        self._reported: set[tuple[float, bytes]] = set()
        self._journal = True
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self._fd = -1

    @property
    def readable(self) -> bool:
        """Whether the kernel itself lets this user read its log, which is cheap."""
        return self._fd >= 0

    def read(self) -> list[tuple[float, str]]:
        """The relevant lines since the last call, at most the latest `MAX_LINES`, each with its
        time (seconds since the epoch)."""
        lines = self._records() if self._fd >= 0 else self._entries()
        found = [(then, line) for then, line in lines if re.search(TROUBLE, line[:MAX_LINE])]
        fresh = [line for line in found if line not in self._reported]
        if lines:
            self._reported = set(found)
        return [(then, shown(line[:MAX_LINE])) for then, line in fresh[-MAX_LINES:]]

    def _records(self) -> list[tuple[float, bytes]]:
        # The kernel's time stamps do not include the corrections of time servers.
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
            # Lines that begin with a space are details, not records.
            records = filter(None, (re.match(RECORD, line) for line in data.splitlines()))
            found += [(min(now, booted + int(record[1]) / 1e6), record[2]) for record in records]
        return found

    def _entries(self) -> list[tuple[float, bytes]]:
        """Lines from systemd, which lets administrators read the log when the kernel does not."""
        import subprocess

        if not self._journal:
            return []
        command = ["journalctl", "-k", "-q", "-o", "short-unix", "--no-pager", "--since"]
        # In reverse, because older versions apply -n from the start of the period.
        command += ["@%d" % self._since, "-r", "-n", str(JOURNAL_LINES)]
        try:
            process = start_helper(command)
        except OSError:  # not installed
            self._journal = False
            return []
        try:
            output = process.communicate(timeout=JOURNAL_LIMIT)[0]
        except subprocess.SubprocessError:
            process.kill()
            return []
        finally:
            HELPERS.discard(process.pid)
        entries = filter(None, (re.match(ENTRY, one) for one in reversed(output.splitlines())))
        return [(float(entry[1]), entry[2]) for entry in entries]
