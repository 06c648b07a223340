"""Files without a name."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest

from dtrain.transport.memory_file import STDIN, memory_file


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EACCES])
def test_a_kernel_without_files_in_memory(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refused(name: str) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "memfd_create", refused)
    with memory_file(b"content") as file:
        assert subprocess.check_output(["cat", STDIN, STDIN], stdin=file) == b"contentcontent"


def test_a_limit_is_reported_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", refused)
    with pytest.raises(OSError, match="Too many open files"):
        memory_file()
