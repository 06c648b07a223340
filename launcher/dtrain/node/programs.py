"""The programs that dtrain sends to hosts, each as one text for a bare Python to read."""

from __future__ import annotations

import functools
import re
from importlib import resources

MODULES = {
    "agent": (
        "wire",
        "processes",
        "worker_files",
        "stacks",
        "sweep",
        "isolation",
        "spawn",
        "folder",
        "events",
        "progress",
        "evidence",
        "kernel_log",
        "flight_recorder",
        "ranks",
        "control",
        "network",
        "pulse",
        "supervisor",
        "relay",
        "main",
    ),
    "facts": (
        "files",
        "probing",
        "programs",
        "machine",
        "storage",
        "code",
        "job",
        "network",
        "ports",
        "gpus",
        "gather",
        "main",
    ),
}
"""Of each program: a module needs only those before it, and no two define the same name."""

_FUTURE = "from __future__ import annotations\n"
_ELSEWHERE = re.compile(
    rf"^{_FUTURE}"
    r"|^from dtrain\.node\.\w+\.\w+ import (?:\([^)]*\)|.*)\n"
    r"|^TYPE_CHECKING = .*\n"
    r"|^if TYPE_CHECKING:\n(?:(?: {4}.*)?\n)+",
    re.MULTILINE,
)
"""What a module says for the sake of being one."""


@functools.cache
def program(name: str) -> bytes:
    """The modules of ``dtrain.node.<name>`` one after the other, in one namespace."""
    folder = resources.files(f"dtrain.node.{name}")
    texts = (folder.joinpath(f"{module}.py").read_text("utf-8") for module in MODULES[name])
    return (_FUTURE + "".join(_ELSEWHERE.sub("", text) for text in texts)).encode()
