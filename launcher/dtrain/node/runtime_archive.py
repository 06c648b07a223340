"""Packs `dtrain.runtime` for hosts without dtrain."""

from __future__ import annotations

import io
from collections.abc import Iterator
from importlib import resources
from typing import TYPE_CHECKING

from dtrain.node.sources import once, source

if TYPE_CHECKING:
    from importlib.abc import Traversable  # moves to importlib.resources.abc in Python 3.14

_EXTEND = """
# Other modules come from an installed dtrain, if there is one.
__path__ = __import__("pkgutil").extend_path(__path__, __name__)
"""


@once
def runtime_archive() -> bytes:
    """A zip archive from which Python can import `dtrain.runtime`."""
    import zipfile  # a launch rarely needs it, see `dtrain.node.kept`

    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in runtime_sources().items():
            file.writestr(name, text)
    return archive.getvalue()


@once
def runtime_sources() -> dict[str, str]:
    """The text of each file of the archive."""
    found = {"dtrain/__init__.py": source("dtrain").removesuffix(_EXTEND) + _EXTEND}
    # It is in such an archive itself if a worker launches a job.
    return found | dict(_modules(resources.files("dtrain.runtime"), "dtrain/runtime"))


def _modules(folder: Traversable, name: str) -> Iterator[tuple[str, str]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _modules(entry, f"{name}/{entry.name}")
        elif entry.name.endswith(".py"):
            yield f"{name}/{entry.name}", entry.read_text(encoding="utf-8")
