"""The programs that dtrain sends to hosts: the modules of each, packed."""

from __future__ import annotations

import base64
import functools
import importlib.util
import threading
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

from dtrain.node.boot import IMPORTER, ISOLATED, boot_text, bundle, file_of, pack
from dtrain.node.importer import pack_code
from dtrain.quoting import path, sh, words

if TYPE_CHECKING:
    from importlib.abc import InspectLoader

PROGRAMS = {
    # The relay starts the supervisor with modules that were sent along.
    "agent": ("dtrain.node.agent.relay", "dtrain.node.agent.supervisor"),
    "launch": ("dtrain.node.checked_launch",),
    "relay": ("dtrain.node.agent.relay",),
    "facts": ("dtrain.node.facts.main",),
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

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


def once(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`functools.cache`, but one thread computes a result while others wait for it: the links of
    all hosts ask at the same moment."""
    lock, cached = threading.Lock(), functools.cache(function)

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with lock:
            return cached(*args, **kwargs)  # type: ignore[arg-type]

    return call


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


def source(module: str) -> str:
    """The text of a module of dtrain, which may be in a zip archive: workers find one there."""
    text = _loader(module).get_source(module)
    assert text is not None, module
    return text


@functools.cache
def program(name: str) -> bytes:
    """The packed program as text, see `dtrain.node.boot.framed`."""
    return pack(PROGRAMS[name][0], modules(name))


@once
def bundled(name: str) -> bytes:
    """The program with compiled code, for the stdin of `boot_command`."""
    found = modules(name)
    # Python has compiled most of them when it was installed.
    code = {each: _shipped(_loader(each).get_code(each), file_of(each)) for each in found}
    return bundle(PROGRAMS[name][0], pack_code(found, code, 1))


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


@functools.cache
def _loader(module: str) -> InspectLoader:
    found = importlib.util.find_spec(module)
    assert found is not None, module
    return cast("InspectLoader", found.loader)


def boot_command(python: str, label: str) -> str:
    """The shell command that runs a program on a host with ``python``.

    The host's shell expands ``~/`` at the start of ``python``. Process lists show ``label``.
    Raises ValueError on a NUL.
    """
    arguments = words([boot_text(), "dtrain-agent", label])
    return str(sh("exec ", path(python), f" {ISOLATED} -c ", arguments))
