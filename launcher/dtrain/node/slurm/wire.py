"""Messages in the output of a step, which has a program on each machine.

srun keeps short lines whole, and mixes the lines of all machines. So a message is many lines:
``<node number> <part of the base64 text>``, and ``<node number> .`` as the last.

Shipped to nodes, and the launcher imports it too: Python 3.8, standard library only.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import threading
import zlib

from dtrain.node.agent.wire import MAX_PAYLOAD, encode, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.agent.wire import Json

LINE = 800
"""Characters."""
_PART = re.compile(rb"([0-9]{1,6}) ([A-Za-z0-9+/=]{1,%d}|\.)\n" % LINE)


class StepOutput:
    """The stdout of the program on this machine. Any thread may write."""

    def __init__(self) -> None:
        self._number = os.environ.get("SLURM_NODEID", "0")
        self._lock = threading.Lock()

    def send(self, message: Json) -> None:
        text = base64.b64encode(zlib.compress(encode(message))).decode()
        parts = [text[at : at + LINE] for at in range(0, len(text), LINE)]
        lines = "".join("%s %s\n" % (self._number, part) for part in [*parts, "."])
        with self._lock:
            write_all(1, lines.encode())


class StepInput:
    """Joins the lines of all machines."""

    def __init__(self, limit: int = MAX_PAYLOAD) -> None:
        """``limit``: bytes of a message, from which on it is cut off."""
        self._limit = limit
        self._parts: dict[bytes, list[bytes]] = {}

    def add(self, line: bytes) -> tuple[int, bytes] | None:
        """The number of the machine whose message ``line`` completes, and the message, which is
        empty if it is damaged. Raises ValueError for a line that no program writes."""
        found = _PART.fullmatch(line)
        if not found:
            raise ValueError("not a part of a message")
        number, part = found.groups()
        if part != b".":
            parts = self._parts.setdefault(number, [])
            parts.append(part)
            if len(parts) > self._limit // LINE:
                parts.clear()
            return None
        try:
            unpack = zlib.decompressobj()
            text = base64.b64decode(b"".join(self._parts.pop(number, [])))
            return int(number), unpack.decompress(text, self._limit)
        except (binascii.Error, zlib.error):
            return int(number), b""
