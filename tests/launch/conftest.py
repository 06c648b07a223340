from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.launching import Scene, torch_of


@pytest.fixture
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scene]:
    """End all processes of a test when it ends."""
    scene = Scene(tmp_path, torch_of(request))
    yield scene
    scene.close()
