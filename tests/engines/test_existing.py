"""Commands for runs that another process is in charge of."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dtrain.diagnostics import ExitCode, UsageError
from dtrain.engines import existing
from dtrain.failures.cause import LEFT
from dtrain.runs.events import (
    HostState,
    LauncherAttached,
    NextAttempt,
    NoticeShown,
    RunEvent,
    RunStarted,
    StacksReported,
)
from dtrain.runs.folder import Holder
from dtrain.runs.journal import Journal, encode
from dtrain.runs.record import Record
from dtrain.session.caller import Caller
from dtrain.session.reporting.observer import Observer
from dtrain.session.stopping.control import Control
from dtrain.session.watching import stack_requests
from support.limits import HANG, until
from support.stored import make_run


def test_a_process_of_another_machine_gets_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines can share the folder of the runs. A process here may have the same id."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = make_run()
    folder.journal.write_bytes(encode(0.0, RunStarted(("n1",))))
    claim = folder.claim()
    assert claim is not None
    with subprocess.Popen(["sleep", "600"]) as other:
        (folder.path / "launcher").write_text(f"{other.pid:<20}\nlogin2 boot pid:[1]\n")
        assert folder.holder() == Holder(other.pid, "login2")
        with pytest.raises(UsageError, match=f"process {other.pid} on login2 is in charge"):
            existing.stop(folder, Caller(), force=False)
        assert other.poll() is None
        other.kill()
    claim.close()


def test_a_request_for_stacks_outlives_the_attempt_and_the_process_that_took_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder, control = make_run(), Control()
    folder.journal.write_bytes(encode(0.0, RunStarted(("n1",))))
    journal = Journal(folder.journal)
    claim = folder.claim()
    assert claim is not None
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(existing.stacks, folder, Caller(control=control))
        try:
            for new in (NextAttempt(2, ("n1",)), LauncherAttached(), StacksReported((), ("note",))):
                until(lambda: stack_requests.take(folder) or asked.done())
                journal.write(0.0, new)
            assert asked.result(HANG) == StacksReported((), ("note",))
        finally:
            control.leave()
    claim.close()


class Heard(Observer):
    def __init__(self) -> None:
        self.events: list[RunEvent] = []

    def on_event(self, event: RunEvent) -> None:
        self.events.append(event)


def test_a_request_for_stacks_of_a_queued_job_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder, control, heard = make_run(), Control(), Heard()
    queued = [HostState(host, "queued") for host in Record.load(folder.path).plan.host_names]
    folder.journal.write_bytes(b"".join(encode(0.0, one) for one in queued))
    claim = folder.claim()
    assert claim is not None
    control.leave()
    assert existing.stacks(folder, Caller(heard, control)) is LEFT
    assert NoticeShown(f"run {folder.name} is queued: no worker runs yet") in heard.events
    claim.close()


NOTEBOOK = """
import sys
from pathlib import Path
from dtrain.runs.folder import RunFolder
from dtrain.session.stopping.control import Control
from dtrain.session.stopping.signals import are_handled
from dtrain.session.stopping.stop_requests import listening
folder, control = RunFolder(Path(sys.argv[1])), Control()
claim = folder.claim(signals=are_handled())
print("in charge", flush=True)
sys.stdin.readline()
with listening(folder, control):
    print("listening", flush=True)
    while not control.why:
        control.wait(600)
print(control.why)
"""


def test_a_process_that_handles_no_signals_gets_none_before_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook that takes over a run is in charge before it reads requests; a signal would kill
    it."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = make_run()
    folder.journal.write_bytes(encode(0.0, RunStarted(("n1",))))
    impatient = Control()
    impatient.stop()

    def stop() -> ExitCode:
        return existing.stop(folder, Caller(control=impatient), force=False)

    argv = [sys.executable, "-c", NOTEBOOK, str(folder.path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as notebook:
        assert notebook.stdin and notebook.stdout
        assert notebook.stdout.readline() == "in charge\n"
        assert stop() is ExitCode.INTERRUPTED
        notebook.stdin.write("\n")
        notebook.stdin.flush()
        assert notebook.stdout.readline() == "listening\n"
        assert stop() is ExitCode.INTERRUPTED
        assert notebook.stdout.readline() == "dtrain stop\n"
