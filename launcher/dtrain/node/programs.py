"""The programs that dtrain sends to hosts: the modules of each, packed."""

from __future__ import annotations

import base64
import functools
from importlib.util import MAGIC_NUMBER
from types import CodeType

from dtrain.node.boot import IMPORTER, ISOLATED, boot_text, bundle, file_of, pack
from dtrain.node.importer import pack_code
from dtrain.node.kept import digest_of, keep, kept, read
from dtrain.node.runtime_archive import runtime_archive, runtime_sources
from dtrain.node.sources import loader, once, source
from dtrain.quoting import path, sh, words

PROGRAMS = {
    # The relay starts the supervisor with modules that were sent along.
    "agent": ("dtrain.node.agent.relay", "dtrain.node.agent.supervisor"),
    "launch": ("dtrain.node.checked_launch", "dtrain.node.kept"),
    "relay": ("dtrain.node.agent.relay",),
    "facts": ("dtrain.node.facts.main", "dtrain.node.kept"),
    "command": ("dtrain.node.command",),
    # It starts watchers with modules that were sent along.
    "slurm": ("dtrain.node.slurm.main", "dtrain.node.slurm.watcher"),
    "pod": ("dtrain.node.pods.watcher",),
    "step": ("dtrain.node.slurm.step",),
    "sync": ("dtrain.node.sync.main",),
    "interpreter": ("dtrain.node.interpreter",),
    "rehearsal": ("dtrain.node.ranks", "dtrain.node.rehearsal"),
    "rehearsal_tensorflow": ("dtrain.node.ranks", "dtrain.node.rehearsal_tensorflow"),
    "bandwidth": ("dtrain.node.ranks", "dtrain.node.bandwidth"),
}
"""The module with a program's ``main``, and the modules that it imports only while it runs."""
KEPT = ("launch", "facts")
"""Programs that hosts keep: every launch and every check starts one on each host."""
WITH_RUNTIME = ("agent", "launch")
"""Programs that give workers `dtrain.runtime`."""


@functools.cache
def modules(program: str) -> dict[str, str]:
    """The source of each module that a program needs, by name."""
    found: dict[str, str] = {}
    pending = [IMPORTER, *PROGRAMS[program]]
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = source(name)
            # Only imports at the left margin are needed: imports for the type checker are indented.
            # A regular expression would take longer than all else here.
            lines = found[name].split("\nfrom dtrain")[1:]
            pending += ["dtrain" + line.split(maxsplit=1)[0] for line in lines]
    return found


@functools.cache
def program(name: str) -> bytes:
    """The packed program as text, see `dtrain.node.boot.framed`."""
    return pack(PROGRAMS[name][0], modules(name))


@once
def bundled(name: str) -> bytes:
    """The program with compiled code, for the stdin of `boot_command`. The host keeps it if
    `bundled_before` can start it."""
    return bundle(PROGRAMS[name][0], _payload(name), keep=name in KEPT)


@once
def bundled_before(name: str) -> bytes:
    """One of `KEPT`, if the host has kept it: see `dtrain.node.kept`."""
    return kept(PROGRAMS[name][0], _payload(name))


@once
def _payload(name: str) -> bytes:
    """What the program consists of, see `dtrain.node.importer`."""
    if name not in KEPT:
        return _packed(name, level=1)
    # Two processes pack the same modules differently: how `marshal` writes an object depends on
    # how many others use it.
    texts = {**modules(name), **(runtime_sources() if name in WITH_RUNTIME else {})}
    key = digest_of(repr((MAGIC_NUMBER, sorted(texts.items()))).encode())
    digest = (read(key) or b"").decode()
    payload = read(digest) or b""
    if digest_of(payload) != digest:  # nothing is kept, or this machine has crashed
        payload = _packed(name, level=6)
        digest = digest_of(payload)
        keep(digest, payload)
        keep(key, digest.encode())
    return payload


def _packed(name: str, *, level: int) -> bytes:
    found = modules(name)
    # Python has compiled most of them when it was installed.
    code = {each: _shipped(loader(each).get_code(each), file_of(each)) for each in found}
    files = {"runtime.zip": runtime_archive()} if name in WITH_RUNTIME else {}
    return pack_code(found, code, level, files)


@functools.cache
def bundled_text(name: str) -> str:
    """`bundled`, in base64 for a line of JSON."""
    return base64.b64encode(bundled(name)).decode()


def _shipped(code: CodeType | None, file: str) -> CodeType:
    """The code without this machine's path."""
    assert code is not None, file
    constants = tuple(
        _shipped(one, file) if isinstance(one, CodeType) else one for one in code.co_consts
    )
    return code.replace(co_filename=file, co_consts=constants)


def boot_command(python: str, label: str) -> str:
    """The shell command that runs a program on a host with ``python``.

    The host's shell expands ``~/`` at the start of ``python``. Process lists show ``label``.
    Raises ValueError on a NUL.
    """
    arguments = words([boot_text(), "dtrain-agent", label])
    return str(sh("exec ", path(python), f" {ISOLATED} -c ", arguments))
