"""Packs `dtrain.runtime` for hosts without dtrain."""

from __future__ import annotations

import base64
import functools
import io
import zipfile
from pathlib import Path

from dtrain import runtime

_PACKAGE = """\
# Modules of an installed dtrain can still be imported.
__path__ = __import__("pkgutil").extend_path(__path__, __name__)
"""


@functools.cache
def runtime_archive() -> str:
    """A zip archive, in base64, from which Python can import `dtrain.runtime`."""
    folder = Path(runtime.__file__).parent
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("dtrain/__init__.py", _PACKAGE)
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(folder).as_posix()
            file.writestr(f"dtrain/runtime/{name}", path.read_bytes())
    return base64.b64encode(archive.getvalue()).decode()
