"""Imports dtrain's modules from memory, on a node that has no dtrain.

`dtrain.node.boot` sends this module first; `start` then runs the program. Packages are empty here:
only the launcher uses their ``__init__``. Nothing is written to disk.

Compiling the agent takes longer than all else in its start. So the launcher sends its own compiled
code along, which runs wherever Python has the same bytecode; elsewhere the sources are compiled.

Shipped to nodes: Python 3.8, standard library only.
"""

from __future__ import annotations

import gc
import importlib
import marshal
import sys
from importlib._bootstrap_external import MAGIC_NUMBER  # `importlib.util` takes 4 ms to import
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType
    from typing import Any, BinaryIO


class Importer:
    """A finder and loader for ``sys.meta_path``."""

    def __init__(self, modules: dict[str, str], compiled: bytes = b"") -> None:
        """``modules`` are source texts by name; ``compiled`` is from `bundle`."""
        self.modules = modules
        self._code: dict[str, CodeType] = {}
        if compiled.startswith(MAGIC_NUMBER):
            self._code = marshal.loads(compiled[len(MAGIC_NUMBER) :])
        self._packages = {
            name[:end] for name in modules for end, char in enumerate(name) if char == "."
        }

    def bundle(self) -> bytes:
        """The modules, and their code as far as it is compiled: see `bundle` in
        `dtrain.node.boot`."""
        return pack_code(self.modules, self._code)

    def drop(self, package: str) -> None:
        """Leave a package out of later bundles."""
        for name in [name for name in self.modules if name.startswith(package)]:
            del self.modules[name]
            self._code.pop(name, None)

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.modules and name not in self._packages:
            return None
        # It has all methods of a loader. Importing importlib.abc would be slow.
        loader: Any = self
        return ModuleSpec(name, loader, is_package=name in self._packages)

    def create_module(self, spec: ModuleSpec) -> None:
        """Use the default module object."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in self.modules:
            exec(self._code_of(name), module.__dict__)

    def _code_of(self, name: str) -> CodeType:
        if name not in self._code:
            file = name.replace(".", "/") + ".py"
            self._code[name] = compile(self.modules[name], file, "exec", dont_inherit=True)
        return self._code[name]


def pack_code(modules: dict[str, str], code: dict[str, CodeType]) -> bytes:
    """Sources, and compiled code with the number of its bytecode, for `Importer`."""
    # Version 4 of the format is that of Python 3.4 to 3.13; later ones read it, too.
    return marshal.dumps((modules, MAGIC_NUMBER + marshal.dumps(code)), 4)


def start(stream: BinaryIO, main: str, modules: dict[str, str], compiled: bytes) -> None:
    """Call ``main(stream, importer)`` of the module ``main``."""
    gc.disable()  # imports leave nothing to collect
    importer = Importer(modules, compiled)
    sys.meta_path.insert(0, importer)
    program = importlib.import_module(main)
    gc.freeze()  # or each collection in a forked process would copy all pages
    gc.enable()
    program.main(stream, importer)
