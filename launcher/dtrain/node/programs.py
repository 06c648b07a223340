"""The programs that dtrain sends to hosts, each as one text for a bare Python to read."""

from __future__ import annotations

import functools
import re
from importlib import resources

MODULES = {
    "agent": (
        "trust",
        "agent.wire",
        "agent.folder",
        "agent.processes",
        "agent.worker_files",
        "agent.stacks",
        "agent.control",
        "agent.sweep",
        "agent.isolation",
        "agent.spawn",
        "agent.events",
        "agent.progress",
        "agent.evidence",
        "agent.kernel_log",
        "agent.flight_recorder",
        "agent.ranks",
        "agent.network",
        "agent.environment",
        "agent.pulse",
        "agent.supervisor",
        "agent.relay",
        "agent.main",
    ),
    "facts": (
        "trust",
        "facts.files",
        "facts.probing",
        "facts.programs",
        "facts.machine",
        "facts.storage",
        "facts.code",
        "facts.job",
        "facts.network",
        "facts.ports",
        "facts.gpus",
        "facts.gather",
        "facts.main",
    ),
    "tree": ("trust", "tree"),
}
"""Of each program, its modules in `dtrain.node`: a module needs only those before it, and no two
define the same name."""

_FUTURE = "from __future__ import annotations\n"
_ELSEWHERE = re.compile(
    rf"^{_FUTURE}"
    r"|^from dtrain\.node(?:\.\w+)+ import (?:\([^)]*\)|.*)\n"
    r"|^TYPE_CHECKING = .*\n"
    r"|^if TYPE_CHECKING:\n(?:(?: {4}.*)?\n)+",
    re.MULTILINE,
)
"""What a module says for the sake of being one."""


@functools.cache
def program(name: str) -> bytes:
    """The modules of a program one after the other, in one namespace."""
    folder = resources.files("dtrain.node")
    files = (folder.joinpath(module.replace(".", "/") + ".py") for module in MODULES[name])
    texts = (file.read_text("utf-8") for file in files)
    return (_FUTURE + "".join(_ELSEWHERE.sub("", text) for text in texts)).encode()
