"""A launch over SSH needs no Linux on the launching machine: people launch from macOS too.

Static, because macOS is not tested: what runs there names nothing that only Linux has. Nodes run
Linux, and so do launches on this machine (the local transport).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "launcher/dtrain"
ON_LINUX = ("node/", "runtime/", "transport/local.py")
SHARED = (
    "boot",
    "descriptors",
    "host_name",
    "kept",
    "launchers",
    "listening",
    "programs",
    "revision",
    "protocol",
    "runtime_archive",
    "sources",
    "trust",
    "waiting",
)
"""Modules of `node` that the launching machine runs too."""
MESSAGES = ("agent", "facts", "slurm", "sync")
"""Packages of `node` of which the launching machine imports the messages."""
NAMES = re.compile(
    r"epoll|EPOLL\w+|prctl|pidfd_\w+|memfd_\w+|eventfd\w*|timerfd_\w+|inotify\w*|sched_\w+|unshare"
    r"|setns|splice|pipe2|close_range|\w+xattr|O_PATH|O_TMPFILE|O_DIRECT|SO_PEERCRED|AF_NETLINK"
    r"|AF_PACKET|SOCK_CLOEXEC|SOCK_NONBLOCK|TCP_USER_TIMEOUT|posix_fadvise|posix_fallocate"
    r"|getresuid|setresuid|CDLL"
)
FILES = re.compile(r"/(?:proc|sys)/(?:self|sys|class|fs|kernel|devices|\d|%|\{|net|mounts|meminfo)")
GUARDED = {
    ("cli/dtrain_cli/memory.py", "CDLL"),  # only where the C library has mallopt
    ("node/trust.py", "getxattr"),  # only where `os` has it
    ("node/trust.py", "/proc/self"),  # an OSError means that there is none
    ("node/trust.py", "/proc/sys"),
    ("runs/folder.py", "/proc/self"),  # as above
    ("runs/folder.py", "/proc/sys"),
    ("runs/prune.py", "/proc/self"),  # only for Python 3.10
    ("transport/control_master.py", "SO_PEERCRED"),  # elsewhere LOCAL_PEERCRED
    ("transport/kerberos.py", "CDLL"),  # an OSError means that there is no such library
    ("transport/memory_file.py", "memfd_create"),  # only where `os` has it
}


def sources() -> list[Path]:
    found = [*PACKAGE.rglob("*.py"), *(ROOT / "cli").rglob("*.py")]
    return [path for path in found if not place(path).startswith(ON_LINUX)] + [
        PACKAGE / f"node/{name}.py" for name in SHARED
    ]


def place(path: Path) -> str:
    return str(path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT))


def needs_linux(source: str) -> Iterator[str]:
    """The names that only Linux has, its files, and addresses of abstract sockets."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        name = getattr(node, "attr", None) or getattr(node, "id", "")
        if NAMES.fullmatch(name):
            yield name
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
            yield from (match[0] for match in FILES.finditer(text))
            if len(text) > 1 and text.startswith("\0"):
                yield "abstract socket"


def test_what_runs_on_the_launching_machine_needs_no_linux() -> None:
    found = {(place(path), name) for path in sources() for name in needs_linux(path.read_text())}
    assert found == GUARDED


def test_the_launching_machine_runs_no_other_module_of_the_nodes() -> None:
    imported = set()
    for path in sources():
        if not place(path).startswith("node/"):
            imported |= set(re.findall(r"from dtrain\.node(?:\.(\w+))? import", path.read_text()))
    assert imported <= {"", *SHARED, "command_orders", *MESSAGES}
    for path in sources():
        inner = re.findall(
            rf"from dtrain\.node\.(?:{'|'.join(MESSAGES)})([\w.]*) ", path.read_text()
        )
        assert {*inner} <= {".wire", ".commands", ".orders"}, place(path)


@pytest.mark.parametrize(
    "source",
    ["import select; select.epoll()", "open('/proc/self/fd')", "s.bind('\\0name')", "os.O_PATH"],
)
def test_the_scan_finds_what_only_linux_has(source: str) -> None:
    assert list(needs_linux(source))
