"""Imports dtrain's modules from memory, on a node that has no dtrain.

`dtrain.node.boot` sends this module first; `start` then runs the program. Packages are empty here:
only the launcher uses their ``__init__``.

Compiling the agent takes longer than all else in its start. So the launcher sends its own compiled
code along, which runs wherever Python has the same bytecode. Only elsewhere are the sources
unpacked and compiled.

A payload is all of that: the number of the bytecode, the code, the sources, and files that the
program writes. A host can keep it for the next launch, see `dtrain.node.kept`.
"""

from __future__ import annotations

import gc
import marshal
import sys
import zlib

# `importlib` has the same, but takes 1 ms to import.
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import MAGIC_NUMBER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType
    from typing import Any, BinaryIO, Callable


class Importer:
    """A finder and loader for ``sys.meta_path``."""

    def __init__(
        self,
        code: dict[str, CodeType],
        sources: Callable[[], dict[str, str]],
        files: dict[str, bytes],
    ) -> None:
        """``code`` and ``sources`` are those of all modules by name. Without ``code``, the sources
        are compiled."""
        self.files = files
        """The content of each file that the program writes."""
        self._code = code
        self._sources = sources
        self._unpacked: dict[str, str] = {}
        self._names = frozenset(code or self.modules)
        self._packages = {
            name[:end] for name in self._names for end, char in enumerate(name) if char == "."
        }

    @property
    def modules(self) -> dict[str, str]:
        """The source of each module."""
        self._unpacked = self._unpacked or self._sources()
        return self._unpacked

    def bundle(self) -> bytes:
        """All modules, for another process of this Python: see `bundle` in `dtrain.node.boot`."""
        return pack_code(self.modules, {name: self._code_of(name) for name in self._names}, 0, {})

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._names and name not in self._packages:
            return None
        # It has all methods of a loader. Importing importlib.abc would be slow.
        loader: Any = self
        return ModuleSpec(name, loader, is_package=name in self._packages)

    def create_module(self, spec: ModuleSpec) -> None:
        """Use the default module object."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in self._names:
            exec(self._code_of(name), module.__dict__)

    def _code_of(self, name: str) -> CodeType:
        if name not in self._code:
            file = name.replace(".", "/") + ".py"
            self._code[name] = compile(self.modules[name], file, "exec", dont_inherit=True)
        return self._code[name]


def pack_code(
    modules: dict[str, str], code: dict[str, CodeType], level: int, files: dict[str, bytes]
) -> bytes:
    """A payload. Code and sources are compressed at ``level`` (0 to 9)."""
    # Version 4 of the format is that of Python 3.4 to 3.13; later ones read it, too. Code needs its
    # own Python anyway.
    parts = marshal.dumps(code), marshal.dumps(modules, 4)
    packed = (zlib.compress(part, level) for part in parts)
    return marshal.dumps((MAGIC_NUMBER, *packed, files), 4)


def start(
    stream: BinaryIO,
    main: str,
    code: dict[str, CodeType],
    sources: Callable[[], dict[str, str]],
    files: dict[str, bytes],
    to_keep: bytes = b"",
) -> None:
    """Call ``main(stream, importer)`` of the module ``main``. ``to_keep``: the payload, if this
    host is to keep it."""
    gc.disable()  # imports leave nothing to collect
    importer = Importer(code, sources, files)
    sys.meta_path.insert(0, importer)
    if to_keep:
        from dtrain.node.kept import digest_of, keep

        keep(digest_of(to_keep), to_keep)
    __import__(main)
    gc.freeze()  # or each collection in a forked process would copy all pages
    gc.enable()
    sys.modules[main].main(stream, importer)
