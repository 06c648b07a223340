"""The end of what an earlier attempt has left on a host."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.diagnostics import ConnectError
from dtrain.engines.ssh import controller
from dtrain.engines.ssh.cleanup import Cleanups
from dtrain.engines.ssh.controller import SshEngine
from dtrain.node.agent.wire import encode
from dtrain.runs.events import NoticeShown, RunEvent
from dtrain.runs.folder import RunFolder
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.session.caller import Caller
from dtrain.session.reporting.observer import Observer
from dtrain.spec.model import Host
from support.limits import HANG
from support.scripted import ScriptedHosts, relay_stdout
from support.threads import no_free_thread

FILE = "cluster: {hosts: [gpu01], gpus: 1}\njob: {framework: none, script: train.py}\n"
HELLO = {
    "type": "hello", "time": 0.0, "pid": 7
}  # fmt: skip


GONE = {"type": "refused", "what": "gone", "reason": "no run", "hint": ""}
SURVIVORS = [{"pid": 9, "name": "python3"}]
ENDED = {"type": "event", "offset": 9, "event": {"event": "ended", "time": 0.0, "survivors": []}}
SURVIVED = {**ENDED, "event": {"event": "ended", "time": 0.0, "survivors": SURVIVORS}}
LOST = {"type": "lost", "reason": "it died", "survivors": []}
BYE = {"type": "bye"}
RECORD = Record("run", Request("cluster.yaml", "/", FILE), 29500, "python3", 0.0)


def unexpected(error: Exception) -> None:
    raise AssertionError(error)


@pytest.mark.parametrize(
    ("said", "clean"),
    [([GONE], True),
     ([BYE], False),
     ([ENDED], True),
     ([LOST], True),
     ([{**LOST, "survivors": SURVIVORS}], False),
     ([SURVIVED, BYE], False),
     ([SURVIVED, LOST], True),
     ([SURVIVED, {**LOST, "survivors": SURVIVORS}], False)],
)  # fmt: skip
def test_a_host_that_has_answered_is_left_at_once(said: list[object], *, clean: bool) -> None:
    closed = threading.Event()

    class Connection(ScriptedHosts):
        def connect(self, host: Host) -> Connection:
            return self

        def close(self) -> None:
            closed.set()

    output = relay_stdout(map(encode, (HELLO, *said)))
    cleanups = Cleanups(Connection({"gpu01": output}, "gpu01"))
    cleanups.start(RECORD, [("gpu01", 1)], unexpected)
    assert closed.wait(HANG)
    assert cleanups.clean == ({("gpu01", 1)} if clean else set())
    assert cleanups.pending == []
    cleanups.close()


def test_a_cleanup_without_a_free_thread_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cleanups = Cleanups(ScriptedHosts({}))
    reported: list[Exception] = []
    with no_free_thread(monkeypatch, "gpu01 cleanup"):
        cleanups.start(RECORD, [("gpu01", 1)], reported.append)
    assert (cleanups.clean, cleanups.pending) == (set(), [])
    assert str(*reported) == "can't start new thread"
    cleanups.close()


def test_a_host_that_keeps_processes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dtrain stop` of a run that is over."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = RunFolder.create("run")
    record = replace(RECORD, leftovers=(("gpu01", 1),))
    record.save(folder.path)
    said: list[object] = []

    class Heard(Observer):
        def on_event(self, event: RunEvent) -> None:
            said.append(event)

    output = relay_stdout(map(encode, (HELLO, {**LOST, "survivors": SURVIVORS})))
    engine = SshEngine(record.request, Caller(Heard()), ScriptedHosts({"gpu01": output}, "gpu01"))
    assert not engine.clean(record, folder)
    assert said == [NoticeShown("processes of the run may be left on gpu01")]
    assert Record.load(folder.path).leftovers == record.leftovers


def test_a_host_out_of_reach_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    monkeypatch.setattr(controller, "CLEAN_SECONDS", 0.5)
    monkeypatch.setattr(controller, "CLEAN_NOTICE_SECONDS", 0.0)
    folder = RunFolder.create("run")
    record = replace(RECORD, leftovers=(("gpu01", 1),))
    record.save(folder.path)
    said: list[str] = []

    class Heard(Observer):
        def on_event(self, event: RunEvent) -> None:
            said.append(str(event))

    class Away(ScriptedHosts):
        def connect(self, host: Host) -> Away:
            raise ConnectError(host.name, "connecting", "timed out")

    engine = SshEngine(record.request, Caller(Heard()), Away({}))
    assert not engine.clean(record, folder)
    assert "gpu01 cannot be reached yet; retrying for 0.5 s; Ctrl-C gives up" in said[0]


def test_why_a_host_cannot_be_reached_is_known() -> None:
    tried = threading.Semaphore(0)

    class Away(ScriptedHosts):
        def connect(self, host: Host) -> Away:
            tried.release()
            raise ConnectError(host.name, "connecting", "timed out")

    cleanups = Cleanups(Away({}))
    cleanups.start(RECORD, [("gpu01", 1)], unexpected)
    for _ in range(2):
        assert tried.acquire(timeout=HANG)
    assert [problem.reason for problem in cleanups.problems] == ["timed out"]
    cleanups.close()


def test_a_bug_is_not_hidden() -> None:
    class Faulty(ScriptedHosts):
        def connect(self, host: Host) -> Faulty:
            raise ZeroDivisionError

    cleanups = Cleanups(Faulty({}))
    reported: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    cleanups.start(RECORD, [("gpu01", 1)], reported.put)
    assert isinstance(reported.get(timeout=HANG), ZeroDivisionError)
    assert (cleanups.clean, cleanups.pending) == (set(), [])
    cleanups.close()
