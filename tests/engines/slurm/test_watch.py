"""The end of what a Slurm job reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtrain.diagnostics import ConnectError, ExitCode
from dtrain.engines.slurm import follow
from dtrain.engines.slurm.follow import SlurmFollower
from dtrain.engines.slurm.job import SlurmJob
from dtrain.engines.slurm.state import SlurmState
from dtrain.failures.cause import Report
from dtrain.messages.agent import Kernel, ProgressReport
from dtrain.messages.slurm import read_message
from dtrain.runs import events
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import JournalReader
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.runs.shown_state import ShownState
from dtrain.runs.storage import StorageError
from dtrain.session.caller import Caller
from dtrain.session.reporting.observer import Observer
from dtrain.session.reporting.recorder import MAX_NOTICES
from dtrain.session.stopping.control import Control

FILE = """
cluster: {nodes: 1, gpus: 1, slurm: {partition: p}}
job: {framework: torch, script: train.py}
"""


class Notices(Observer):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_event(self, event: events.RunEvent) -> None:
        if isinstance(event, events.NoticeShown):
            self.texts.append(event.text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    return RunFolder.create("run-1")


def followed(folder: RunFolder, observer: Observer, file: str = FILE) -> SlurmJob:
    record = Record("run-1", Request("c.yaml", "/", file), 29500, "python3", 1e9, job_id="7")
    return SlurmJob(record, folder, Caller(observer), {})


def journaled(folder: RunFolder) -> list[events.JournalEvent]:
    return [event for _, event in JournalReader(folder.journal).read()]


def test_a_suspended_job_says_so(folder: RunFolder) -> None:
    """It runs, as far as Slurm's queue goes, but another job has its machines."""
    observer = Notices()
    job = followed(folder, observer)
    for state in ("RUNNING", "SUSPENDED", "SUSPENDED", "RUNNING"):
        job.update(SlurmState(state, hosts=("n1",)))
    assert observer.texts == ["job 7 does not run: Slurm has suspended it"]
    states = [one for one in journaled(folder) if isinstance(one, events.HostState)]
    assert [(one.state, one.detail) for one in states] == [
        (ShownState.RUNNING, ""),
        (ShownState.RUNNING, "Slurm has suspended it"),
        (ShownState.RUNNING, ""),
    ]


def test_the_last_phases_of_a_job_are_journaled(folder: RunFolder) -> None:
    job = followed(folder, Observer())
    for done in (1, 2, 3):
        said = {
            "event": "steps", "done": done, "waits": None, "group": 1, "blocks": [],
            "time": 1e9 + done, "phases": {"data": 0.25 * done},
        }  # fmt: skip
        job.watch.worker_said("n1", ProgressReport("rank-0.progress", 0, said))
    job.finish(Report(ExitCode.OK, "done"))
    found = journaled(folder)
    phases = [event.seconds for event in found if isinstance(event, events.PhasesSpent)]
    assert phases == [{"data": 0.25}, {"data": 0.75}]
    assert isinstance(found[-1], events.Finished)


@pytest.mark.parametrize(
    ("finished", "said", "early"),
    [
        (4.0, "RuntimeError: Connection closed by peer", True),
        (6.0, "RuntimeError: Connection closed by peer", False),
        (4.0, "ValueError: bad batch", False),
        (None, "RuntimeError: Connection closed by peer", False),
    ],
)
def test_a_rank_that_ended_early_is_named_if_others_lose_their_connection_to_it(
    folder: RunFolder, finished: float | None, said: str, *, early: bool
) -> None:
    job = followed(folder, Observer(), FILE.replace("nodes: 1", "nodes: 2"))
    job.number("7")
    job.update(SlurmState("FAILED", status=1, hosts=("n1", "n2")))
    stderr = folder.logs / "n2" / "rank-1.err"
    stderr.parent.mkdir(parents=True)
    stderr.write_text(f"{said}\n")
    for number, then in enumerate((finished, 5.0)):
        if then is not None:
            job.task_ended(f"n{number + 1}", number, then)
    assert [label for label, _, _ in job.watch.workers.finished()] == ["0", "1"][finished is None :]
    job.script_said("srun: error: n2: task 1: Exited with exit code 1\n")
    report = job.ended("")
    assert report.reason == "rank 1 on n2 exited with status 1"
    assert [failure.time for failure in report.failures] == [5.0]
    named = ("rank 0 on n1 had already ended, with status 0",)
    assert report.problems == (named if early else ())
    assert ("the same number of steps" in report.hint) is early


def test_a_cancellation_that_is_repeated_is_recorded_once(folder: RunFolder) -> None:
    job = followed(folder, Observer())
    for kill in (False, False, True, True):
        job.cancelling("SIGHUP", kill=kill)
    assert [*map(type, journaled(folder))] == [events.StopRequested, *[events.NoticeShown] * 2]


@pytest.mark.parametrize("restarts", [0, 1])
def test_slurm_or_the_script_may_be_first_to_know_of_another_attempt(
    folder: RunFolder, restarts: int
) -> None:
    job = followed(folder, Observer())
    assert not job.has_restarted()
    job.update(SlurmState("RUNNING", hosts=("n1",), restarts=restarts))
    job.script_said("" if restarts else "dtrain: attempt 2\n")
    assert job.has_restarted()


def test_machines_are_watched_although_the_record_cannot_be_saved(folder: RunFolder) -> None:
    """As on a full disk. The job still runs on them."""
    job = followed(folder, Observer())
    (folder.path / "run.json").mkdir()  # nothing can replace it
    with pytest.raises(StorageError):
        job.update(SlurmState("RUNNING", hosts=("gpu03",)))
    assert job.plan.host_names == job.watch.plan.host_names == ("gpu03",)


def test_a_machine_shows_few_notices(folder: RunFolder) -> None:
    """Workers cause them: each truncation of an output file is one."""
    observer = Notices()
    job = followed(folder, observer)
    job.update(SlurmState("RUNNING", hosts=("n1",)))
    login: Any = None
    follower = SlurmFollower(job, login, Control())
    for size in range(3 * MAX_NOTICES):
        said = {"type": "notice", "host": "n1", "text": f"worker-0.out was truncated: {size}"}
        follower._handle(read_message(said))
    assert observer.texts[0] == "n1: worker-0.out was truncated: 0"
    assert len(observer.texts) == MAX_NOTICES + 1
    assert observer.texts[-1] == "n1: more notices are hidden"
    # Machines that Slurm has not named have one limit together: their names come from outside.
    for number in range(3 * MAX_NOTICES):
        said = {"type": "notice", "host": f"x{number}", "text": "worker-0.out was truncated"}
        follower._handle(read_message(said))
    assert len(observer.texts) == 2 * (MAX_NOTICES + 1)
    assert observer.texts[MAX_NOTICES + 1].endswith(": x0: worker-0.out was truncated")


def test_a_job_without_watchers_is_not_asked_for_stacks(folder: RunFolder) -> None:
    """They could not start, so the report of a hang does not wait for them."""
    job = followed(folder, Notices())
    job.update(SlurmState("RUNNING", hosts=("n1",)))
    login: Any = None
    (machine,) = job.watch.machines.values()
    follower = SlurmFollower(job, login, Control())
    follower._handle(read_message({"type": "unwatched", "text": "srun: error"}))
    assert machine.reported_end


def test_an_order_for_stacks_waits_for_the_watcher_of_its_machine(folder: RunFolder) -> None:
    """Watchers start seconds after the job, and what they get before is lost."""
    watch = followed(folder, Observer(), FILE.replace("nodes: 1", "nodes: 2")).watch
    _, second = watch.machines
    for machine in watch.machines.values():
        machine.request_stacks(abort=False, ras=False)
    assert watch.orders == []
    for _ in range(2):
        watch.machine_said(second, Kernel(1.0, (), ()))
    assert [order.get("host") for order in watch.orders] == [second]
    watch.machines[second].request_stacks(abort=True, ras=False)
    assert len(watch.orders) == 2
    watch.update(None)
    watch.machines[second].request_stacks(abort=True, ras=False)
    assert len(watch.orders) == 2


def test_a_job_with_a_number_is_not_submitted_again(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm may have forgotten it, so the program on the login node would not find it."""
    monkeypatch.setattr(follow, "FIRST_DELAY", 0.01)
    orders: list[str] = []

    class Broken(SlurmFollower):
        def _serve(self, order: Any) -> bool:
            orders.append(order["op"])
            job.may_exist = True
            if len(orders) == 2:
                job.number("7")
            if len(orders) == 3:
                control.leave()
            raise ConnectError("login", "following the job", "the connection was lost")

    request = Request("c.yaml", "/", FILE)
    record = Record("run-1", request, 29500, "python3", 1e9)
    job, control = SlurmJob(record, folder, Caller(), {}), Control()
    login: Any = None
    order: Any = {"op": "submit"}
    assert Broken(job, login, control)._follow(order) is None
    assert orders == ["submit", "submit", "follow"]
