"""How long a host collects the stacks of a job that hangs."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain.node.agent import diagnosis, nccl_ras, stacks
from dtrain.node.agent.flight_recorder import READ_LIMIT
from dtrain.node.agent.processes import environment_of, look
from dtrain.node.agent.sweep import ABORT_LIMIT
from dtrain.session.watching.whereabouts import STACKS_SECONDS
from support.limits import HANG, until


def test_a_host_answers_before_the_launcher_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL, py-spy and the flight recorder all take as long as they may. NCCL and py-spy are asked
    while the ranks write their dumps."""
    now = [0.0]

    def spend(seconds: float, found: Any = None) -> Any:
        now[0] += seconds
        return found

    monkeypatch.setattr(diagnosis, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=spend))
    monkeypatch.setattr(diagnosis, "KernelLog", SimpleNamespace)
    monkeypatch.setattr(diagnosis, "query", lambda *_: spend(nccl_ras.LIMIT, ""))
    monkeypatch.setattr(diagnosis, "spy", lambda _: spend(stacks.SPY_LIMIT, ({}, {})))
    done = threading.Event()
    events: Any = SimpleNamespace(append=lambda kind, **_: kind == "stacks_done" and done.set())
    flights: Any = SimpleNamespace(request_dump=lambda rank: True, new_dumps=list)
    process: Any = SimpleNamespace(pid=7)
    one = diagnosis.Diagnosis(events, flights, ("127.0.0.1", 28028))
    one.collect_stacks([({"rank": 0}, process)], abort=False, ras=True)
    assert done.wait(HANG)
    assert now[0] + READ_LIMIT + ABORT_LIMIT < STACKS_SECONDS


RANK = """
import sys, threading, time
for _ in range(int(sys.argv[1])):
    threading.Thread(target=time.sleep, args=(600,)).start()
print("up", flush=True)
time.sleep(600)
"""
STRICT = f"""
import os, signal, subprocess, sys
command = [sys.executable, "-X", "faulthandler", "-c", {RANK!r}]
ranks = [
    subprocess.Popen([*command, threads], stdout=subprocess.PIPE, stderr=stderr)
    for threads, stderr in (("0", subprocess.DEVNULL), ("90", None))
]
for rank in ranks:
    rank.stdout.readline()
print(*(rank.pid for rank in ranks), flush=True)
os.wait()
os.kill(ranks[1].pid, signal.SIGKILL)
"""


def test_all_ranks_write_their_stacks_before_their_parent_reacts() -> None:
    """It kills the others at once, as torchrun does on a busy machine."""
    reading, writing = os.pipe()
    # The second rank cannot write its stacks before the first has ended.
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    with Popen([sys.executable, "-c", STRICT], stdout=PIPE, stderr=writing, text=True) as parent:
        os.close(writing)
        assert parent.stdout
        ranks = [look(int(pid)) for pid in parent.stdout.readline().split()]
        procs = [rank for rank in ranks if rank is not None]
        aborting = threading.Thread(target=stacks.abort_all, args=(procs,))
        aborting.start()
        until(lambda: (now := look(procs[0].pid)) is None or not now.alive, "the first rank's end")
        with os.fdopen(reading) as stderr:
            written = stderr.read()
        aborting.join(HANG)
    assert written.count("hread 0x") == 91


def test_why_py_spy_has_no_stack(tmp_path: Path) -> None:
    with Popen(["sleep", "600"], env={"PATH": "/usr/bin:/bin"}) as other, ExitStack() as stack:
        stack.callback(other.kill)
        (tmp_path / "py-spy").symlink_to(Path(sys.executable).parent / "py-spy")
        environment = {"PATH": f"{tmp_path}:/usr/bin"}
        program = stack.enter_context(Popen(["sleep", "600"], env=environment))
        stack.callback(program.kill)
        # The kernel sets it shortly after the start.
        until(lambda: environment_of(other.pid) and environment_of(program.pid))
        found, problems = stacks.spy([other.pid, program.pid])
    assert found == {}
    assert problems[other.pid] == "no py-spy in the environment"
    assert problems[program.pid].startswith("py-spy: Failed to find python version")
    denied = b"Permission Denied: Try running again with elevated permissions"
    assert "does not let py-spy read it" in stacks._why_none(denied)
