"""Where a job hangs, from stacks that Python itself and py-spy wrote."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.failures.stacks import (
    MAX_FRAME,
    MAX_FRAMES,
    MAX_GROUPS,
    MAX_STACKS,
    Frame,
    WaitingPlace,
    compare,
    grouped,
    place,
    stack,
)
from support.limits import HANG

SPY = """\
Process 4242: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 4242 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:3000)
    wrapper (torch/distributed/c10d_logger.py:81)
    step (/home/me/gpt (old)/train.py:40)
    <module> (/home/me/gpt (old)/train.py:60)
Thread 4250 (idle): "Thread-1"
    wait (threading.py:320)
"""

WAITS = """\
Thread 4242 (idle): "MainThread"
    Event.wait (threading.py:629)
    <module> (/home/ml/train.py:60)
"""
WAITS_TOO = """\
Fatal Python error: Aborted

Current thread 0x00007f9c2b435b80 (most recent call first):
  File "threading.py", line 629 in wait
  File "/home/ml/train.py", line 60 in <module>
"""


def test_py_spy() -> None:
    frames = stack(SPY)
    assert frames[0] == Frame("torch/distributed/distributed_c10d.py", 3000, "all_reduce")
    assert frames[-1] == Frame("/home/me/gpt (old)/train.py", 60, "<module>")
    assert len(frames) == 4


def test_both_say_the_same_of_the_same_place() -> None:
    assert stack(WAITS) == stack(WAITS_TOO) != []


def test_a_number_that_is_no_line() -> None:
    """A worker may write anything, and Python converts at most 4300 digits."""
    for text in (WAITS, WAITS_TOO):
        assert [frame.line for frame in stack(text.replace("629", "9" * 5000))] == [60]


def test_what_python_writes_on_a_signal(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import queue, sys, threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "def load():\n"
        "    print('up', flush=True)\n"
        "    return queue.Queue().get()\n"
        "load()\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={"PYTHONFAULTHANDLER": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    # It is about to wait, or waits already: both are within `load`.
    process.send_signal(signal.SIGABRT)
    said = process.communicate(timeout=HANG)[1]
    assert place(stack(said)).script.startswith("load (")


def test_a_place_names_the_call_and_the_scripts_line() -> None:
    library = "/venv/lib/python3.11/site-packages/torch/distributed/"
    frames = [
        Frame(f"{library}distributed_c10d.py", 3000, "all_reduce"),
        Frame(f"{library}c10d_logger.py", 81, "wrapper"),
        Frame("/home/ml/train.py", 40, "step"),
        Frame("/home/ml/train.py", 60, "<module>"),
    ]
    assert str(place(frames)) == "all_reduce, called by step (/home/ml/train.py:40)"
    assert str(place(frames[1:])) == "wrapper, called by step (/home/ml/train.py:40)"
    assert str(place(frames[2:])) == "step (/home/ml/train.py:40)"
    assert str(place(frames[:2])) == "all_reduce"
    assert str(place([])) == "an unknown place"


def test_a_collective_within_a_library() -> None:
    """DeepSpeed 0.19.8: `engine.backward(loss)` reduces gradients."""
    packages = "/opt/venv/lib/python3.11/site-packages"
    frames = [
        Frame(f"{packages}/torch/distributed/distributed_c10d.py", 3252, "all_reduce"),
        Frame(f"{packages}/torch/distributed/c10d_logger.py", 83, "wrapper"),
        Frame(f"{packages}/deepspeed/comm/comm.py", 710, "all_reduce"),
        Frame(f"{packages}/deepspeed/runtime/engine.py", 3431, "backward"),
        Frame(f"{packages}/deepspeed/utils/nvtx.py", 33, "wrapped_fn"),
        Frame("/home/ml/train.py", 40, "step"),
    ]
    assert str(place(frames)) == "all_reduce in backward, called by step (/home/ml/train.py:40)"
    assert str(place(frames[2:])) == "backward, called by step (/home/ml/train.py:40)"
    assert str(place(frames[:-1])) == "all_reduce"


def test_the_lock_of_a_build_that_was_killed() -> None:
    """Torch 2.13.0: all ranks wait for it, and their outermost call looks like a rendezvous."""
    packages = "/opt/venv/lib/python3.11/site-packages"
    frames = [
        Frame(f"{packages}/torch/utils/file_baton.py", 50, "wait"),
        Frame(f"{packages}/torch/utils/cpp_extension.py", 2400, "_jit_compile"),
        Frame(f"{packages}/deepspeed/comm/comm.py", 910, "init_distributed"),
        Frame("/home/ml/train.py", 28, "main"),
    ]
    found = str(place(frames))
    assert found.startswith("init_distributed (waits for another process that builds an extension")
    assert "~/.cache/torch_extensions), called by main (/home/ml/train.py:28)" in found
    assert str(place(frames[1:])) == "init_distributed, called by main (/home/ml/train.py:28)"
    # The program may be an installed package.
    assert str(place(frames[:-1])).startswith("wait (waits for another process that builds")


@pytest.mark.parametrize("said", ["", "Traceback (most recent call last):\n  x", "Thread 0x12"])
def test_text_without_a_stack(said: str) -> None:
    assert stack(said) == []


def test_the_one_that_differs_comes_last() -> None:
    waiting, loading = (
        WaitingPlace("all_reduce", "step (t.py:40)"),
        WaitingPlace("", "load (t.py:12)"),
    )
    places = {"0": waiting, "1": waiting, "2": loading, "3": waiting}
    assert compare(places) == [(waiting, ["0", "1", "3"]), (loading, ["2"])]


def test_a_file_may_be_in_another_folder_on_each_host() -> None:
    places = {
        host: WaitingPlace("backward", f"train (/{host}/home/train.py:{line})")
        for host, line in (("n1", 18), ("n2", 22), ("n3", 18))
    }
    assert compare(places) == [(places["n1"], ["n1", "n3"]), (places["n2"], ["n2"])]


def test_a_report_is_short_whatever_hosts_invent() -> None:
    name = "f" * 1000
    texts = {
        (str(rank), "a"): "\n".join(f"    {name} (/t{rank}.py:{line})" for line in range(200))
        for rank in range(MAX_GROUPS + 10)
    }
    found = grouped(texts)
    assert len(found) == MAX_GROUPS
    assert len(found[0].frames) == MAX_FRAMES
    assert len(found[0].frames[0]) == MAX_FRAME
    assert len(found[0].place) <= 2 * MAX_FRAME
    assert [bool(group.frames) for group in found] == [True] * MAX_STACKS + [False] * (
        MAX_GROUPS - MAX_STACKS
    )
