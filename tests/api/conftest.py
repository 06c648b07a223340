from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.launching import Scene, torch_of


@pytest.fixture
def scene(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Scene]:
    """A scene for launches by this process. Stops everything that a test leaves running."""
    scene = Scene(tmp_path, torch_of(request))
    monkeypatch.setenv("DTRAIN_HOME", str(scene.home))
    yield scene
    scene.close()
