"""An attempt over SSH inside the test process."""

from __future__ import annotations

from pathlib import Path

from dtrain.engines.ssh.context import AttemptContext
from dtrain.launchplan.build import build
from dtrain.node.agent.wire import VERSION
from dtrain.runs.folder import RunFolder
from dtrain.session.reporting.observer import Observer
from dtrain.session.reporting.recorder import Recorder
from dtrain.session.watching.reports import ProgressReports
from dtrain.spec.load import parse
from support.scripted import ScriptedHosts

TWO_HOSTS = "cluster: {hosts: [first, second], gpus: 1}\njob: {framework: none, script: train.py}\n"
HELLO = {
    "type": "hello", "protocol": VERSION, "python": "3.11.2", "hostname": "h", "time": 0.0, "pid": 7
}  # fmt: skip
GONE = {"type": "refused", "what": "gone", "reason": "no run", "hint": ""}


def context_of(transport: ScriptedHosts, folder: Path, file: str = TWO_HOSTS) -> AttemptContext:
    plan = build(parse(file, "cluster.yaml"), run="run")
    place = RunFolder(folder)
    recorder = Recorder(place, Observer())
    return AttemptContext(
        plan=plan,
        movable_port=False,
        base=folder,
        secrets={},
        transport=transport,
        tree=None,
        folder=place,
        recorder=recorder,
        inspection=None,
        progress=ProgressReports(plan, recorder),
    )
