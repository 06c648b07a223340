"""A job that a launcher no longer waits for, or that may come late, and `dtrain stop` later."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from dtrain.diagnostics import ConnectError, ExitCode
from dtrain.engines.slurm import session
from dtrain.engines.slurm.job import SlurmJob
from dtrain.engines.slurm.session import SlurmEngine
from dtrain.engines.slurm.submission import HERE
from dtrain.failures.cause import Report
from dtrain.node.agent.wire import encode
from dtrain.runs.folder import RunFolder
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.runs.storage import StorageError
from dtrain.session.caller import Caller
from dtrain.session.relays import relay
from dtrain.session.stopping.control import Control
from dtrain.spec.model import Host
from support.limits import HANG
from support.scripted import ScriptedHosts, SilentHost, relay_stdout

FILE = "cluster: {slurm: {}, nodes: 2, slots: 1}\njob: {framework: none, command: [x]}\n"
REQUEST = Request("c.yaml", "/", FILE, check=False)
SUBMITTED = {"type": "submitted", "job": None}
REFUSED = {"type": "refused", "command": "sbatch", "status": 1, "text": "Socket timed out"}


@pytest.fixture
def given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = RunFolder.create("run-1")
    record = Record(
        "run-1", REQUEST, 29500, "python3", 1e9, job_id="7", allocated=("gpu03", "gpu04")
    )
    job = SlurmJob(record, folder, Caller(), {})
    assert job.given_up("Ctrl-C", job.still_there()).hint == "`dtrain stop run-1` tries again"
    return folder


def engine(*said: Any) -> SlurmEngine:
    """``said``: the messages of the program on the login host."""
    hosts = ScriptedHosts({HERE: relay_stdout(map(encode, (*said, {"type": "bye"})))})
    return SlurmEngine(REQUEST, Caller(), hosts)


def clean(folder: RunFolder, state: str) -> bool:
    """Whether nothing is left, as Slurm says that the job has this state."""
    said = [
        {"type": "submitted", "job": "7", "uncertain": False},
        {"type": "cancelling"},
        {"type": "job", "text": f"JobId=7 JobState={state}"},
    ]
    return engine(*said).clean(Record.load(folder.path), folder)


def test_a_job_that_was_given_up_is_killed_later(given_up: RunFolder) -> None:
    assert [attempt for _, attempt in Record.load(given_up.path).leftovers] == [1, 1]
    assert clean(given_up, "CANCELLED")
    assert Record.load(given_up.path).leftovers == ()


class Connected(SilentHost):
    def connect(self, host: Host) -> SilentHost:
        return self

    def read(self, size: int = 1 << 18) -> bytes:
        self.opened.set()
        return super().read(size)


class Connecting(SilentHost):
    def connect(self, host: Host) -> SilentHost:
        self.opened.set()
        assert self.closed.wait(HANG)
        raise ConnectError(host.name, "connecting", "closed")


@pytest.mark.parametrize("kind", [Connected, Connecting])
def test_a_third_request_does_not_wait_for_the_login_host(
    given_up: RunFolder, monkeypatch: pytest.MonkeyPatch, kind: type[SilentHost]
) -> None:
    monkeypatch.setattr(relay, "PING_SECONDS", HANG)
    host, control, reports = kind(), Control(), list[Report]()

    def attach() -> None:
        engine = SlurmEngine(REQUEST, Caller(control=control), host)
        reports.append(engine.attach(Record.load(given_up.path), given_up, {}))

    follows = threading.Thread(target=attach, daemon=True)
    follows.start()
    assert host.opened.wait(HANG)
    for _ in range(3):
        control.stop("Ctrl-C")
    follows.join(HANG)
    assert reports[0].exit_code is ExitCode.INTERRUPTED
    assert "job 7 may still be there" in reports[0].problems[0]


def test_a_full_disk_does_not_hide_how_to_end_a_job(
    given_up: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageError("no space left on device")

    monkeypatch.setattr(Record, "save", full)
    job = SlurmJob(Record.load(given_up.path), given_up, Caller(), {})
    assert "scancel 7" in job.given_up("Ctrl-C", job.still_there()).problems[0]


def test_a_job_that_does_not_end_is_left(
    given_up: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "GONE_SECONDS", -1.0)
    monkeypatch.setattr(session, "CLEAN_POLL", 0.0)
    assert not clean(given_up, "COMPLETING")
    assert Record.load(given_up.path).leftovers


def test_a_job_that_slurm_may_still_accept_stays_left(
    given_up: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "GONE_SECONDS", -1.0)
    monkeypatch.setattr(session, "CLEAN_POLL", 0.0)
    late = engine({**SUBMITTED, "uncertain": True})
    assert not late.clean(Record.load(given_up.path), given_up)
    assert Record.load(given_up.path).leftovers


@pytest.mark.parametrize("said", [SUBMITTED, REFUSED])
@pytest.mark.parametrize("uncertain", [True, False])
def test_a_job_that_slurm_may_accept_later_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any, uncertain: bool
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    report = engine({**said, "uncertain": uncertain}).run({})
    folder = RunFolder.find(report.run)
    (hint,) = [line for line in report.hint.splitlines() if "dtrain stop" in line] or [""]
    assert hint == (f"`dtrain stop {report.run}` ends it" if uncertain else "")
    assert ("the job may be submitted" in str(report.problems)) == uncertain
    assert bool(Record.load(folder.path).leftovers) == uncertain
    assert clean(folder, "CANCELLED")
    assert Record.load(folder.path).leftovers == ()


def test_a_login_host_that_answers_nonsense_may_have_submitted_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    report = engine({"type": "nonsense"}).run({})
    assert report.reason == "the job cannot be followed"
    assert Record.load(RunFolder.find(report.run).path).leftovers


def test_a_login_host_that_does_not_start_the_program_has_not_submitted_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a login script ended the shell."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    report = SlurmEngine(REQUEST, Caller(), ScriptedHosts({HERE: b"Welcome\n"})).run({})
    assert report.reason == "not submitted: running the agent failed"
    assert not Record.load(RunFolder.find(report.run).path).leftovers


def test_the_report_of_a_refused_job_begins_with_the_words_of_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    said = "sbatch: error: invalid partition specified: gpuu"
    refused = {**REFUSED, "command": "sbatch --partition=gpuu", "text": said, "uncertain": False}
    report = engine(refused).run({})
    assert report.reason == f"not submitted: {said}"
    assert report.problems == (
        f"{HERE}: the command, which ended with status 1: sbatch --partition=gpuu",
    )


@pytest.mark.parametrize("job", [None, "7"])
def test_a_job_may_exist_if_an_earlier_launcher_submitted_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str | None
) -> None:
    """Also if that launcher was killed before it learned the job's number."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = RunFolder.create("run-1")
    record = Record("run-1", REQUEST, 29500, "python3", 1e9, job_id=job)
    report = engine({"type": "nonsense"}).attach(record, folder, {})
    assert report.reason == "the job cannot be followed"
    assert report.hint.endswith("`dtrain stop run-1` ends it")
    assert Record.load(folder.path).leftovers
