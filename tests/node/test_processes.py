"""The agent signals processes, and starts helpers, where the system allows less than usual."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from dtrain.node.agent import isolation, processes
from dtrain.node.agent.diagnosis import Diagnosis
from dtrain.node.agent.events import Events
from dtrain.node.agent.flight_recorder import FlightRecorders
from dtrain.node.agent.isolation import in_child
from dtrain.node.agent.processes import descendants, look, send
from dtrain.node.command import CommandRelay, NodeCommand
from support.limits import GONE, HANG


def test_a_signal_arrives_in_a_container_that_forbids_pidfds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_: object) -> NoReturn:  # `Popen.wait` of Python 3.15 passes flags
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "pidfd_open", forbidden)
    process = subprocess.Popen(["sleep", "600"])
    try:
        proc = look(process.pid)
        assert proc is not None
        proc.start += 1
        send(proc, signal.SIGKILL)  # another process
        proc.start -= 1
        send(proc, signal.SIGTERM)
        assert process.wait(GONE) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def test_a_host_that_starts_no_more_processes_gives_no_evidence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused() -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(isolation.os, "fork", refused)
    assert in_child(dict, 10.0, 1 << 20, 100) is None
    assert os.listdir("/proc/self/fd") == before


def test_a_child_that_outlives_the_run_holds_none_of_its_files() -> None:
    with socket.create_server(("127.0.0.1", 0)):  # as a port of the job
        found = in_child(lambda: {"open": os.listdir("/proc/self/fd")}, HANG, 1 << 29, 1 << 16)
    assert found is not None
    assert len(found["open"]) == 2, "more than its answer and this list"


def test_a_request_for_stacks_is_answered_without_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        events = Events(folder)
        diagnosis = Diagnosis(events, FlightRecorders({}, os.fsencode(tmp_path), 1), None)
        monkeypatch.setattr(threading.Thread, "start", refused)
        diagnosis.collect_stacks([], abort=False, ras=False)
    finally:
        os.close(folder)
    assert b'"stacks_done"' in (tmp_path / "events").read_bytes()


@pytest.mark.parametrize("listed", [True, False])
def test_descendants_are_found_with_and_without_the_kernel_s_list(
    monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    if not listed:
        monkeypatch.setattr(processes, "children_of", lambda _pid: None)
    script = "sleep 600 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        sleep = int(shell.stdout.readline())
        try:
            assert descendants(shell.pid) == [shell.pid, sleep]
        finally:
            os.kill(sleep, signal.SIGKILL)
    assert sleep not in descendants(os.getpid())


def test_a_reused_process_id_does_not_change_how_a_command_ended() -> None:
    command, relay = object.__new__(NodeCommand), object.__new__(CommandRelay)
    command.pid, command.status = 7, None
    relay._commands = [command]
    relay._take(7, 256)
    relay._take(7, 0)
    assert command.status == 256
