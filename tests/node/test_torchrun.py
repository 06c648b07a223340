"""The ranks of a torchrun have separate streams and failures."""

from __future__ import annotations

import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from dtrain.environ.torchrun import LOGS
from support.node import Node

pytestmark = pytest.mark.torch

# Ranks need not import torch; `record` writes error files.
SCRIPT = """
import os, sys
rank = int(os.environ["RANK"])
os.write(1, b"".join(b"rank %d line %d\\n" % (rank, n) for n in range(20000)))
os.write(2, b"rank %d \\xff, no newline" % rank)
if sys.argv[1:] == ["fail"]:
    from torch.distributed.elastic.multiprocessing.errors import record
    @record
    def main():
        if rank == 1:
            raise ValueError("bad batch \\u00fc")
        import time
        time.sleep(600)
    main()
"""


def torchrun(host: Node, *args: str) -> dict[str, Any]:
    (host.workdir / "script.py").write_text(SCRIPT)
    argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"]
    argv += ["--max-restarts=0", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    return host.process(
        [*argv, "script.py", *args], role="torchrun", rank=None, ranks=2, environment=dict(LOGS)
    )


def test_each_rank_is_streamed_byte_for_byte(host: Node) -> None:
    agent = host.start(torchrun(host))
    agent.wait()
    assert agent.event("exited")["code"] == 0
    for rank in (0, 1):
        out = b"".join(b"rank %d line %d\n" % (rank, n) for n in range(20000))
        assert bytes(agent.output[f"rank-{rank}.out"]) == out
        assert bytes(agent.output[f"rank-{rank}.err"]) == b"rank %d \xff, no newline" % rank
    started = agent.event("rank", rank=1)
    assert (started["role"], started["index"]) == ("torchrun", 0)
    assert host.processes() == {}


def test_the_failing_rank_is_named(host: Node) -> None:
    agent = host.start(torchrun(host, "fail"))
    exited = agent.event("exited")
    agent.wait()
    assert exited["code"] == 1
    assert exited["error"]["message"] == "ValueError: bad batch ü"
    by_rank = {one["rank"]: one for one in exited["ranks"]}
    assert by_rank[1]["message"] == "ValueError: bad batch ü"
    assert 'raise ValueError("bad batch' in by_rank[1]["traceback"]
    assert by_rank[1]["exitcode"] == 1
    assert by_rank[1]["time"] <= exited["time"]
    assert (by_rank[0]["exitcode"], by_rank[0]["signal"]) == (None, "SIGTERM")
    assert by_rank[0]["pid"] and by_rank[1]["pid"]
    assert host.processes() == {}


def test_ranks_are_ended_when_torchrun_is_killed(host: Node) -> None:
    (host.workdir / "script.py").write_text("import time; time.sleep(600)")
    argv = [*torchrun(host)["argv"][:-1], "sleep.py"]
    (host.workdir / "sleep.py").write_text("import time; print('ready'); time.sleep(600)")
    agent = host.start(
        host.process(argv, role="torchrun", rank=None, ranks=2, environment=dict(LOGS))
    )
    agent.until(lambda: agent.text("rank-0.out") and agent.text("rank-1.out"))
    agent.command("kill")
    agent.wait()
    assert agent.event("ended")["survivors"] == []
    assert host.processes() == {}


WAITING = """
import os, threading
def load_batch(): print("up", flush=True); threading.Event().wait()
def all_reduce(): print("up", flush=True); threading.Event().wait()
load_batch() if os.environ["RANK"] == "1" else all_reduce()
"""


@pytest.mark.parametrize("told_by", ["py-spy", "python itself"])
def test_the_stack_of_each_rank_is_reported(host: Node, told_by: str, tmp_path: Path) -> None:
    process = torchrun(host)
    (host.workdir / "script.py").write_text(WAITING)
    if told_by != "py-spy":
        # An environment without py-spy, which takes torch from this one.
        python = environment_without_spy(tmp_path / "environment")
        process["argv"][0] = str(python)
        process["environment"] |= {"PATH": "/usr/bin:/bin", "VIRTUAL_ENV": ""}
        process["environment"]["PYTHONFAULTHANDLER"] = "1"
    agent = host.start(process)
    agent.until(lambda: agent.text("rank-0.out") and agent.text("rank-1.out"))
    agent.command("stacks", abort=told_by != "py-spy")
    if told_by == "py-spy":
        agent.until(lambda: any(event["event"] == "stacks_done" for event in agent.events))
        found = [event for event in agent.events if event["event"] == "stack"]
        workers = {(event["role"], event["index"]) for event in found}
        assert workers == {("worker", 0), ("worker", 1)}
        stacks = {event["rank"]: event["text"] for event in found}
        agent.command("kill")
        agent.wait()
    else:
        agent.wait()
        stacks = {rank: agent.text(f"rank-{rank}.err") for rank in (0, 1)}
    assert sorted(stacks) == [0, 1]
    assert "all_reduce" in stacks[0] and "load_batch" not in stacks[0]
    assert "load_batch" in stacks[1]
    assert host.processes() == {}


def environment_without_spy(folder: Path) -> Path:
    """The interpreter of a new environment that has this one's packages, but not its programs."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "this.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin/python"
