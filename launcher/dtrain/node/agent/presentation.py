"""What other processes see of this one: its command line and its environment.

The kernel shows both in /proc from the memory in which it put them when the program began.
prctl(2), PR_SET_MM_MAP, names other memory, which needs no privilege. Kernels without
CONFIG_CHECKPOINT_RESTORE refuse it.
"""

from __future__ import annotations

import struct

from dtrain.node.files import read_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping

PR_SET_MM, PR_SET_MM_MAP = 35, 14
_STAT = {
    "code": (26, 27),
    "data": (45, 46),
    "brk": (47,),
    "stack": (28,),
    "shown": (48, 49, 50, 51),
}
"""Fields of /proc/PID/stat, from 1: see proc_pid_stat(5)."""
_shown: list[Any] = []
"""Keeps the memory that the kernel reads."""


def can_present() -> bool:
    """Whether `present` is possible: sets what is there already."""
    return _set(None)


def present(argv: list[bytes], environment: Mapping[bytes, bytes]) -> bool:
    """Show ``argv`` and ``environment`` in /proc. Returns False if the kernel refuses."""
    words = b"".join(word + b"\0" for word in argv)
    variables = b"".join(b"%b=%b\0" % variable for variable in environment.items())
    return _set((words, variables))


def _set(contents: tuple[bytes, bytes] | None) -> bool:
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        libc.sbrk.restype = ctypes.c_void_p
        fields = (read_file("/proc/self/stat") or b"").rpartition(b")")[2].split()
        at = {name: [int(fields[one - 3]) for one in each] for name, each in _STAT.items()}
        if contents is not None:
            memory = ctypes.create_string_buffer(b"".join(contents))
            _shown.append(memory)
            begin = ctypes.addressof(memory)
            middle = begin + len(contents[0])
            at["shown"] = [begin, middle, middle, middle + len(contents[1])]
        # struct prctl_mm_map, with no auxiliary vector and no new executable
        numbers = [*at["code"], *at["data"], *at["brk"], libc.sbrk(0), *at["stack"], *at["shown"]]
        map_ = struct.pack("=12QIi", *numbers, 0, 0, -1)
        size = ctypes.c_ulong(len(map_))
        return bool(libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.c_char_p(map_), size, 0) == 0)
    except (ImportError, OSError, AttributeError, IndexError, ValueError, struct.error):
        return False
