"""The folder of a run."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from dtrain.runs.folder import RunFolder
from dtrain.runs.storage import StorageError


def test_a_folder_that_cannot_be_completed_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a record, it would only hide the job's last run."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    mkdir = os.mkdir

    def full(path: Any, *args: Any, **options: Any) -> None:
        if path == "run-1/logs":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        mkdir(path, *args, **options)

    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(StorageError, match="No space left"):
        RunFolder.create("run-1")
    assert list((tmp_path / "runs").iterdir()) == []
