"""Compiled code comes from a folder that no other user can change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import nn

from dtrain.runtime.torch import recompute
from support.other_users import MALLORY, folder_of, give

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other users"),
]


@pytest.mark.parametrize("planted", ["theirs", "link", "writable", "none"])
def test_where_torch_keeps_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    folder = tmp_path / "torchinductor_me"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    match planted:
        case "theirs":
            folder_of(MALLORY, folder, 0o755)
        case "link":
            folder.symlink_to(tmp_path)
            give(folder, MALLORY)
        case "writable":
            folder.mkdir()
            folder.chmod(0o777)
    recompute._check_cache.cache_clear()
    if planted == "none":
        recompute.compiled(nn.Linear(1, 1))
        assert folder.stat().st_mode & 0o777 == 0o700
    else:
        with pytest.raises(RuntimeError, match=f"another user can change {folder}"):
            recompute.compiled(nn.Linear(1, 1))
