"""A run's folder with one of every event in its journal, without a launch."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from dtrain.checks import Finding, Severity
from dtrain.diagnostics import ExitCode
from dtrain.failures.cause import Failure, Report
from dtrain.failures.kernel import KernelMessage
from dtrain.failures.stacks import StackGroup
from dtrain.failures.stalls import Stall
from dtrain.failures.stragglers import Straggler
from dtrain.messages.agent import Revision
from dtrain.runs import events, journal, restart
from dtrain.runs.folder import RunFolder
from dtrain.runs.progress import Progress
from dtrain.runs.record import Record
from dtrain.runs.request import Request

FILE = """
cluster: {hosts: "n[1-3]", spares: [s1], gpus: 2, transport: local}
job: {framework: torch, script: train.py, restart: {max: 3}, elastic: {min_hosts: 1}}
"""
FAILURE = Failure(
    host="n2",
    role="worker",
    index=3,
    rank=3,
    time=30.5,
    code=1,
    message="ValueError: bad batch",
    traceback="Traceback …\nValueError: bad batch\n",
    pid=4321,
    kernel=KernelMessage("xid-79", "NVRM: Xid 79", "GPU 1 fell off the bus", "reset it", 30.0),
)
STRAGGLER = Straggler(("rank-3",), ("n2",), False, 0.125, "data", 1200)
REPORT = Report(
    ExitCode.JOB_FAILED,
    "rank 3 on n2 exited with status 1",
    failures=(FAILURE,),
    problems=("n3: lost",),
    hint="look at it",
    seconds=12.5,
    logs="/somewhere",
    stragglers=STRAGGLER,
)
EVENTS = (
    events.RunStarted(("n1", "n2", "n3")),
    events.Findings((Finding(Severity.WARNING, "clock", ("n1",), "seen", "wanted", "do it"),)),
    events.HostState("n1", "connecting"),
    events.RelayHello("n1", {"time": 1.5, "pid": 77}),
    events.HostState("n2", "unreachable", "no route to host"),
    events.HostEvent("n1", 120, {"event": "started", "time": 2.0, "role": "worker", "index": 0}),
    events.NoticeShown("2 workers started"),
    events.TensorBoardAddress("n1", "TensorBoard of n1: http://127.0.0.1:6006/"),
    events.Progressed(Progress("rank-0", 3.0, 10, 100, 0.25, 4096, {"lr": 1e-4})),
    events.PhasesSpent(3.5, 10, {"data": 0.5, "save": 2.0}),
    events.StragglersChanged(STRAGGLER),
    events.StallChanged(Stall(("rank-3",), ("n2",), 20.5, 1200, 3)),
    events.HangDetected(12.5, ends=True),
    events.StacksReported(
        (
            StackGroup(
                (("3", "n2"),), "load (/home/ml/train.py:4)", ("load (/home/ml/train.py:4)",)
            ),
        ),
        ("no answer from n3",),
    ),
    events.AttemptFailed(
        1, restart.AttemptResult(True, 10, "n2", lost=frozenset({"n2"}), seconds=5.0), REPORT
    ),
    events.NextAttempt(2, ("n1", "s1", "n3")),
    events.LauncherAttached(),
    events.StopRequested("Ctrl-C"),
    events.Notified("restarted", 1),
    events.Cleaned(("n3: lost",), "stop it again"),
    events.HostsAllocated(("n1", "n2")),
    events.CodeKnown(Revision("3f2a9c", ("train.py",), 1, "8d01ab3f")),
)
END = events.Finished(REPORT)


REQUEST = Request("cluster.yaml", "/", FILE, ("--lr", "1e-4"), {"SEED": "1"})
RECORD = Record("run-1", REQUEST, 29500, "python3", 1e9, 2, {"n2": "s1"}, {}, (("n2", 1),))


@cache
def make_record() -> bytes:
    """A ``run.json``."""
    with tempfile.TemporaryDirectory() as folder:
        RECORD.save(Path(folder))
        return (Path(folder) / "run.json").read_bytes()


@cache
def make_journal() -> bytes:
    """A journal."""
    return b"".join(journal.encode(RECORD.started, event) for event in (*EVENTS, END))


def make_run(name: str = "run-1") -> RunFolder:
    """A run in ``DTRAIN_HOME`` that has had two attempts, with some output of each."""
    folder = RunFolder.create(name)
    replace(RECORD, run=name, leftovers=()).save(folder.path)
    folder.journal.write_bytes(make_journal())
    for logs in ("logs", "logs-2"):
        host = folder.path / logs / "n1"
        host.mkdir(parents=True, exist_ok=True)
        (host / "worker-0.out").write_text(f"a line in {logs}\n")
    return folder
