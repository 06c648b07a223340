"""Imports dtrain's modules from memory, on a node that has no dtrain.

`pack` in `dtrain.node.boot` sends this module first; `start` then runs the program. Packages are
empty here: only the launcher uses their ``__init__``. Nothing is written to disk.

Shipped to nodes: Python 3.8, standard library only.
"""

from __future__ import annotations

import importlib
import marshal
import sys
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType
    from typing import Any, BinaryIO


class Importer:
    """A finder and loader for ``sys.meta_path``."""

    def __init__(self, modules: dict[str, str], compiled: bytes = b"") -> None:
        """``modules`` are source texts by name; ``compiled`` is the result of `compiled` of another
        importer of the same Python."""
        self.modules = modules
        self._code: dict[str, CodeType] = marshal.loads(compiled) if compiled else {}
        self._packages = {
            name[:end] for name in modules for end, char in enumerate(name) if char == "."
        }

    def compiled(self) -> bytes:
        """The code of the modules imported so far, so that the next process need not compile."""
        return marshal.dumps(self._code)

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


def start(stream: BinaryIO, main: str, modules: dict[str, str], compiled: bytes) -> None:
    """Call ``main(stream, importer)`` of the module ``main``."""
    importer = Importer(modules, compiled)
    sys.meta_path.insert(0, importer)
    importlib.import_module(main).main(stream, importer)
