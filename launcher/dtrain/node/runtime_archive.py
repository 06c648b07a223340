"""Packs `dtrain.runtime` for hosts without dtrain."""

from __future__ import annotations

import base64
import io
import zipfile
from collections.abc import Iterator
from importlib import resources
from typing import TYPE_CHECKING

from dtrain.node.programs import once, source

if TYPE_CHECKING:
    from importlib.abc import Traversable  # moves to importlib.resources.abc in Python 3.14

_EXTEND = """
# Other modules come from an installed dtrain, if there is one.
__path__ = __import__("pkgutil").extend_path(__path__, __name__)
"""


@once
def runtime_archive() -> str:
    """A zip archive, in base64, from which Python can import `dtrain.runtime`."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("dtrain/__init__.py", source("dtrain").removesuffix(_EXTEND) + _EXTEND)
        # It is in such an archive itself if a worker launches a job.
        for name, content in _modules(resources.files("dtrain.runtime"), "dtrain/runtime"):
            file.writestr(name, content)
    return base64.b64encode(archive.getvalue()).decode()


def _modules(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _modules(entry, f"{name}/{entry.name}")
        elif entry.name.endswith(".py"):
            yield f"{name}/{entry.name}", entry.read_bytes()
