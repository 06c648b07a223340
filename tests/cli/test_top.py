"""`dtrain top`, on runs that another process is in charge of."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dtrain.failures.stalls import Stall
from dtrain.messages.telemetry import Sample
from dtrain.runs import events
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import Journal
from dtrain.runs.progress import Progress
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.runs.telemetry import TelemetryWriter
from dtrain_cli.views.board import Board
from dtrain_cli.views.overview import draw
from support.launching import completed
from support.limits import HANG
from support.stored import END

FILE = """
cluster: {hosts: "n[1-2]", gpus: 1, transport: local}
job: {framework: torch, script: train.py}
"""


def dtrain(*argv: str) -> subprocess.CompletedProcess[str]:
    return completed(*argv, environment=os.environ)


def sample(slowed: int) -> Sample:
    gpu = [0, 97, 70_000, 81_559, 610, 700, 88, 1200, 1980, slowed, 0, 0, *[None] * 5]
    body = {"time": 1.0, "cpus": 4, "cpu": 2.0, "memory": [1, 4], "gpus": [gpu], "ranks": []}
    return Sample.read(body | dict.fromkeys(("disk", "network", "infiniband")))


def running(name: str) -> RunFolder:
    """A run of two hosts, the second of which has a GPU that is too hot."""
    folder = RunFolder.create(name)
    record = Record(name, Request("cluster.yaml", "/", FILE), 29500, "python3", 1e9)
    record.save(folder.path)
    written = Journal(folder.journal)
    for host, slowed in (("n1", 4), ("n2", 0x40)):
        written.write(1e9, events.HostState(host, "running", ""))
        TelemetryWriter(folder.path, host).show(sample(slowed))
    for at, step in ((2.0, 8), (3.0, 10)):
        said = Progress("rank-0", at, step, 100, 0.25, None, {})
        written.write(1e9, events.Progressed(said))
    found = time.time() - 1000
    written.write(found, events.StallChanged(Stall(("rank-1",), ("n2",), 20.0, 10, 1)))
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))


def test_in_a_pipe_it_prints_the_present_state_of_each_run() -> None:
    assert dtrain("top").stdout == "no active runs; `dtrain ps --all` lists all runs\n"
    claims = [running(name).claim() for name in ("one-1", "two-1")]
    done = dtrain("top")
    assert done.returncode == 0, done.stderr
    for text in (
        " one-1  ",
        " two-1  ",
        "2 hosts running",
        " step 10 of 100 · loss 0.25 · 2.0 steps/s · 45 s left",
    ):
        assert text in done.stdout
    assert done.stdout.count(" n2 GPU 0: clock throttled by heat (88 °C, 1,200 of 1,980 MHz)") == 2
    stands = r"rank 1 on n2 stands still after step 10, for (\d+) min; 1 waits for it"
    lengths = re.findall(stands, done.stdout)
    assert len(lengths) == 2
    assert min(map(int, lengths)) >= 17  # it went on since
    assert "\x1b" not in done.stdout
    Journal(running("one-2").journal).write(2e9, END)
    assert dtrain("top", "one").stdout.startswith(" one-1  ")
    over = dtrain("top", "one-2").stdout
    assert over.startswith(" one-2 is over, after ")
    assert "busy" not in over  # its last samples say nothing about now
    for claim in claims:
        assert claim is not None
        claim.close()


def test_a_run_without_a_launcher_is_not_taken_over() -> None:
    running("one-1")
    read, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "dtrain_cli", "top", "one-1"],
        env={**os.environ, "TERM": "xterm", "LANG": "C.UTF-8"},
        stdout=terminal,
    )
    assert process.wait(HANG) == 0
    os.close(terminal)
    shown = os.read(read, 1 << 16).decode().replace("\r\n", "\n")
    os.close(read)
    attach = "`dtrain attach one-1` takes charge of it and shows it"
    asks = "`dtrain ps one-1` asks its hosts for its state"
    text = f" one-1 has no launcher: {asks}, and {attach}\n"
    assert [shown, dtrain("top").stdout] == [text] * 2
    hint = f"no launcher; {attach}"
    board = Board("one-1", attended=False)
    board.on_event(events.Sampled("n1", sample(0)), 0.0)
    lines = [line.plain for line in draw([board], 80, 24, 1.0)]
    assert lines[3].strip() == hint
    assert not any(lines[4:])  # what is known of it is old


def test_a_run_that_just_ended_is_not_one_to_attach_to() -> None:
    folders = [running(name) for name in ("one-1", "two-1")]
    claims = [folder.claim() for folder in folders]
    read, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "dtrain_cli", "top"],
        env={**os.environ, "TERM": "xterm", "LANG": "C.UTF-8"},
        stdout=terminal,
    )
    os.close(terminal)
    shown = b""
    while b" 2 runs" not in shown:
        shown += os.read(read, 1 << 16)
    Journal(folders[0].journal).write(2e9, END)
    assert claims[0] is not None
    claims[0].close()
    while b" 1 run " not in shown:
        shown += os.read(read, 1 << 16)
    process.send_signal(signal.SIGINT)
    assert process.wait(HANG) == 0
    os.close(read)
    assert b"no launcher" not in shown


SUSPENDED = """
import contextlib, signal
from dtrain_cli.commands.watch import suspendable
@contextlib.contextmanager
def away():
    print("left", flush=True)
    yield
    print("back", flush=True)
with suspendable(away):
    signal.raise_signal(signal.SIGTSTP)
print("over", flush=True)
"""


def test_ctrl_z_leaves_the_screen_first() -> None:
    process = subprocess.Popen([sys.executable, "-c", SUSPENDED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert process.stdout.readline() == "left\n"
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=HANG)[0] == "back\nover\n"
    assert process.returncode == 0
