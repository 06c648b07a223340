from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.launching import Scene


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """End all processes of a test when it ends."""
    scene = Scene(tmp_path)
    yield scene
    scene.close()
