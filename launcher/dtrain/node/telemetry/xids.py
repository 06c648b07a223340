"""Counts the Xid errors of this host's GPUs."""

from __future__ import annotations

import re
import time

from dtrain.node.agent.kernel_log import KernelLog

XID = r"NVRM: Xid \(PCI:([0-9a-fA-F:.]{1,20})\)"
BETWEEN = 10.0
"""Seconds between two reads of the kernel's log."""


class Xids:
    """Counts Xid errors by PCI address, if this user may read the kernel's log."""

    def __init__(self) -> None:
        self._log = KernelLog()
        self._counts: dict[str, int] = {}
        self._until = 0.0

    def count(self) -> dict[str, int]:
        now = time.monotonic()
        if self._log.readable and now >= self._until:
            self._until = now + BETWEEN
            for _, line in self._log.read():
                found = re.search(XID, line)
                if found:
                    bus = found[1].lower().partition(".")[0]
                    self._counts[bus] = self._counts.get(bus, 0) + 1
        return self._counts
