"""What the agent takes from the kernel's log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtrain.node.agent.kernel_log import KernelLog

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name=python, GPU has fallen off the bus."


def test_only_what_is_new_and_matters(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(f"3,1,1000,-;{XID} (long ago)\n")
    log = KernelLog(str(path))
    assert log.read() == []
    with path.open("a") as file:
        file.write(f"6,2,2000,-;usb 1-2: new device\n3,3,2001,-;{XID}\n SUBSYSTEM=pci\n")
    assert log.read() == [XID]
    assert log.read() == []


def test_systemd_is_asked_where_the_kernel_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "journal"
    program = tmp_path / "journalctl"
    program.write_text(f'#!/bin/sh\n[ "$1" = -k ] && cat {journal}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    log = KernelLog(str(tmp_path / "none"))
    journal.write_text(f"usb 1-2: new device\n{XID}\n")
    assert log.read() == [XID]
    journal.write_text(f"usb 1-2: new device\n{XID}\n{XID} (again)\n")
    assert log.read() == [f"{XID} (again)"]


def test_nobody_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert KernelLog(str(tmp_path / "none")).read() == []
