"""What the kernel says while a job runs: memory that ran out, disks and GPUs that failed."""

from __future__ import annotations

import os
import re
import time

from dtrain.node.agent.processes import read_file
from dtrain.node.agent.wire import shown

TROUBLE = re.compile(
    rb"NVRM: Xid|[Kk]ill(?:ed)? process \d|I/O error|EXT4-fs error|XFS \(.*(?:orruption|hutting)"
)
"""Lines of the kernel's log that the launcher may want; `failures/kernel.yaml` knows them."""
MAX_RECORDS, MAX_LINES, MAX_LINE = 1 << 16, 50, 500
JOURNAL_LIMIT = 2.0
"""Seconds for journalctl to answer."""


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
        self._told = 0
        self._journal_answers = True
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self._fd = -1

    def read(self) -> list[str]:
        """The lines that matter and are new since the last call."""
        lines: list[bytes] = []
        if self._fd >= 0:
            lines = self._records()
        elif self._journal_answers:
            lines = self._journal()
        found = [line for line in lines if TROUBLE.search(line)]
        return [shown(line[:MAX_LINE]) for line in found[:MAX_LINES]]

    def _records(self) -> list[bytes]:
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
            # "priority,number,time,flags;message", and lines with details that begin with a space
            found += [
                line.partition(b";")[2] for line in data.splitlines() if not line.startswith(b" ")
            ]
        return found

    def _journal(self) -> list[bytes]:
        """By systemd, which lets administrators read what the kernel itself keeps from them."""
        import subprocess

        command = ["journalctl", "-k", "-q", "-o", "cat", "--no-pager", "--since"]
        try:
            done = subprocess.run(
                [*command, "@%d" % self._since], capture_output=True, timeout=JOURNAL_LIMIT
            )
        except (OSError, subprocess.SubprocessError):
            self._journal_answers = False  # there is none, or it holds up the end of the others
            return []
        lines = done.stdout.splitlines()
        told, self._told = self._told, len(lines)
        return lines[told:]
