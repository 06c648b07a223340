"""The agent reads the kernel's log."""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path

import pytest

from dtrain.node.agent import kernel_log
from dtrain.node.agent.kernel_log import MAX_LINES, KernelLog
from support.limits import HANG

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name=python, GPU has fallen off the bus."


def texts(log: KernelLog) -> list[str]:
    return [text for _, text in log.read()]


def test_only_new_and_relevant_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(f"3,1,1000,-;{XID} (long ago)\n")
    log = KernelLog(str(path))
    assert log.read() == []
    with path.open("a") as file:
        file.write(f"6,2,2000,-;usb 1-2: new device\n3,3,2001,-,caller=T1;{XID}\n SUBSYSTEM=pci\n")
    assert texts(log) == [XID]
    assert log.read() == []


def test_a_record_has_the_time_at_which_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.touch()
    log = KernelLog(str(path))
    before, ago = time.time(), 10
    booted = time.clock_gettime(time.CLOCK_MONOTONIC_RAW)
    path.write_text(f"3,1,{int((booted - ago) * 1e6)},-;{XID}\n")
    ((then, _),) = log.read()
    assert before - ago - 1 < then < time.time() - ago + 1


def test_only_the_latest_lines_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.touch()
    log = KernelLog(str(path))
    path.write_text("".join(f"3,{n},{n},-;{XID} ({n})\n" for n in range(60)))
    assert texts(log) == [f"{XID} ({n})" for n in range(60 - MAX_LINES, 60)]


def test_journalctl_is_used_if_the_kernel_log_is_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "journal"
    program = tmp_path / "journalctl"
    program.write_text(
        f"#!/bin/sh\n[ -e {tmp_path}/slow ] && exec sleep 600\n"
        f'case "$*" in "-k "*" -r -n 2000") tac {journal};; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(kernel_log, "JOURNAL_LIMIT", HANG)  # for a busy machine
    log = KernelLog(str(tmp_path / "none"))
    lines = ["1700000000.000001 gpu01 kernel: usb 1-2: new device"]
    lines += [f"1700000000.000002 gpu01 kernel: {XID}", "    that goes on"]
    journal.write_text("\n".join(lines) + "\n")
    assert log.read() == [(1700000000.000002, XID)]
    lines += [f"1700000000.000002 gpu01 kernel: {XID} (again)"]
    lines += [f"1700000001.5 gpu01 kernel: {XID}"]
    journal.write_text("\n".join(lines) + "\n")
    (tmp_path / "slow").touch()
    with monkeypatch.context() as patch:
        patch.setattr(kernel_log, "JOURNAL_LIMIT", 0.2)
        assert log.read() == []  # too slow once; the next call may be in time
    (tmp_path / "slow").unlink()
    assert log.read() == [(1700000000.000002, f"{XID} (again)"), (1700000001.5, XID)]
    assert log.read() == []


def test_a_log_with_many_problems_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.touch()
    log = KernelLog(str(path))
    tracemalloc.start()
    try:
        for round_ in range(20):
            with path.open("a") as file:
                file.writelines(f"3,{n},{n},-;{XID} ({round_}, {n})\n" for n in range(1000))
            log.read()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1 << 20


def test_no_log_gives_no_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert KernelLog(str(tmp_path / "none")).read() == []
