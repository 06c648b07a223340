"""The evidence of a failure that the supervisor reports, and when it does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dtrain.node.agent import sweep
from dtrain.node.agent.events import EventReader, Events
from dtrain.node.agent.evidence import error_report
from dtrain.node.programs import program
from support.limits import until
from support.node import Node

# Answers once the file `go` exists.
JOURNAL = """#!/bin/sh
touch {asked}
while [ ! -e {go} ]; do sleep 0.02; done
echo "1700000000.5 gpu01 kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
"""


def test_only_the_end_waits_for_evidence(host: Node, tmp_path: Path) -> None:
    asked, go = tmp_path / "asked", tmp_path / "go"
    journal = tmp_path / "journalctl"
    journal.write_text(JOURNAL.format(asked=asked, go=go))
    journal.chmod(0o755)
    source = program("agent").replace(b'"/dev/kmsg"', b'"/dev/no-such-log"')
    for limit in (b"JOURNAL_LIMIT = 2.0", b"EVIDENCE_LIMIT = 5.0"):
        assert limit in source
        source = source.replace(limit, b"%s = 60.0" % limit.split()[0])
    agent = host.agent(environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, source=source)
    host.launch(host.shell("exit 3"), host.shell("exec sleep 600", 1), agent=agent)
    agent.expect("prepared")
    agent.command("start")
    failed = agent.event("exited", index=0)
    assert (failed["code"], failed["stopping"]) == (3, False)
    until(asked.exists)
    agent.command("stop", grace=10.0, reason="a worker failed")
    assert agent.event("exited", index=1)["stopping"]
    assert not any(event["event"] == "kernel" for event in agent.events)
    go.touch()
    agent.event("ended")
    kinds = [event["event"] for event in agent.events]
    assert kinds[-2:] == ["kernel", "ended"]
    ((then, line),) = agent.event("kernel")["lines"]
    assert (then, "Xid" in line) == (1700000000.5, True)


def test_no_git_goes_on_after_the_run(host: Node, tmp_path: Path) -> None:
    started, git = tmp_path / "started", tmp_path / "git"
    git.write_text(f"#!/bin/sh\ntouch {started}\nsleep 600\n")
    git.chmod(0o755)
    (host.workdir / ".git").mkdir()
    agent = host.agent(environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    wait = f"while [ ! -e {started} ]; do sleep 0.02; done"
    host.launch(host.shell(wait), agent=agent, code=".")
    agent.expect("prepared")
    agent.command("start")
    agent.event("ended")
    host.until_nothing_runs()


def test_a_helper_that_hangs_in_its_start_holds_no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "START_LIMIT", 0.01)
    with sweep.STARTING:
        assert sweep.members(sweep.Tag("run", "host", b"/none"), 0) == []
    assert sweep.STARTING.acquire(blocking=False)
    sweep.STARTING.release()


def test_an_event_that_is_too_long_loses_its_details(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path / "events")
    folder = os.open(tmp_path, os.O_RDONLY)
    events = Events(folder)
    os.close(folder)
    events.append(
        "exited", role="worker", index=0, code=1, error={"message": "x" * (1 << 20)}, ranks=[]
    )
    events.append("ended", survivors=[])
    exited, ended = EventReader(path).all()
    assert (exited["code"], exited["error"], ended["event"]) == (1, None, "ended")


def test_a_long_traceback_loses_its_middle(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    callstack = "Traceback (most recent call last):\nValueError: bad\n" + "1\n" * 50_000 + "end"
    said = {"message": "bad", "extraInfo": {"py_callstack": callstack}}
    path.write_text(json.dumps({"message": said}))
    report = error_report(os.fsencode(path), 4096)
    assert report is not None
    assert len(report["traceback"]) <= 4096
    assert "\nValueError: bad\n" in report["traceback"]
    assert report["traceback"].endswith("\nend")
