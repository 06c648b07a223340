"""Files without a name."""

from __future__ import annotations

import os
import subprocess

import pytest

from dtrain.transport.memory_file import STDIN, memory_file


def test_a_kernel_that_forbids_files_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(name: str) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "memfd_create", forbidden)
    with memory_file(b"content") as file:
        assert subprocess.check_output(["cat", STDIN, STDIN], stdin=file) == b"contentcontent"
