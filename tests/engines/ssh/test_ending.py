"""How an attempt ends: its exit code, its reason and what it reports about each host."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.diagnostics import ConnectError, ExitCode, PrepareError
from dtrain.engines.ssh import machine
from dtrain.engines.ssh.attempt import Attempt
from dtrain.engines.ssh.ending import Ending
from dtrain.engines.ssh.host_events import (
    LinkEvent,
    Malformed,
    Post,
    Requested,
    SupervisorTimedOut,
    TimedOut,
    Unreachable,
)
from dtrain.engines.ssh.machine import AttemptState
from dtrain.failures.cause import Failure, Report
from dtrain.messages import agent as messages
from dtrain.messages.decode import ProtocolError
from support.attempts import context_of
from support.scripted import ScriptedHosts

BROKEN = ConnectError("first", "following the job", "cut off", hint="its part may still run")
CUT_OFF = (Unreachable(BROKEN), TimedOut(BROKEN))
NO_RELAY = PrepareError("first", "running the agent", "there is no python3")
SURVIVOR = messages.Survivor(9, "python3")
ENDED = messages.Ended(1.0, ())
DIED = messages.Lost("the supervisor died")
UNCONFIRMED = "first: did not confirm that the job's processes ended"


class Played:
    """An attempt on the hosts `first` and `second` without connections: tests say what happens."""

    def __init__(self, folder: Path) -> None:
        context = context_of(ScriptedHosts({}), folder)
        self.posts = context.posts
        self.attempt = Attempt(context, lambda: None)
        for host in ("first", "second"):
            self.happens(host, Requested(), messages.Prepared())

    def happens(self, host: str, *events: LinkEvent) -> None:
        for event in events:
            self.attempt._links[host].step(event)
        self._handle()

    def finishes(self, host: str) -> None:
        """The host's only worker exits with status 0."""
        worker = machine.WorkerId(host, "worker", ["first", "second"].index(host))
        self.posts.put(Post(machine.WorkerExited(worker, failed=False)))
        self._handle()

    def give_up(self) -> None:
        """Both time limits of the stop expire."""
        for _ in range(2):
            self.posts.put(Post(machine.Alarm()))
        self._handle()

    def _handle(self) -> None:
        while not self.posts.empty():
            self.attempt._handle(self.posts.get())

    @property
    def report(self) -> Report:
        assert self.attempt._state.phase is machine.AttemptPhase.ENDED
        return self.attempt._ending.report(self.attempt._state)


@pytest.fixture
def played(tmp_path: Path) -> Played:
    return Played(tmp_path)


@pytest.mark.parametrize(
    ("events", "code", "said", "hint"),
    [
        ((ENDED,), 0, [], ""),
        (CUT_OFF, 0, ["first: following the job: cut off", UNCONFIRMED], ""),
        ((Unreachable(NO_RELAY), TimedOut(NO_RELAY)), 3, ["there is no python3", UNCONFIRMED], ""),
        ((Unreachable(BROKEN), TimedOut(NO_RELAY)), 3, ["there is no python3", UNCONFIRMED], ""),
        ((DIED,), 0, ["first: running the job: the supervisor died"], ""),
        ((*CUT_OFF[:1], messages.Attached(), DIED), 0, ["the supervisor died"], ""),
        ((messages.Refused("gone", "no run"),), 0, ["first: attaching to the job: no run"], ""),
        ((messages.Ended(1.0, (), "a fault"),), 0, ["the supervisor on the host failed"], ""),
        ((ENDED, *CUT_OFF), 0, ["first: receiving the end of the output: cut off"], ""),
        ((messages.Ended(1.0, (SURVIVOR,)),), 3, ["python3 (pid 9)"], "uninterruptible sleep"),
        ((messages.Lost("it died", (SURVIVOR,)),), 3, ["python3 (pid 9)"], "uninterruptible sleep"),
        (
            (messages.Refused("agent", "damaged"),),
            3,
            ["first: attaching to the job: damaged", UNCONFIRMED],
            "",
        ),
        (
            (*CUT_OFF[:1], messages.Refused("agent", "damaged", "look there")),
            3,
            ["damaged", UNCONFIRMED],
            "look there",
        ),
        ((SupervisorTimedOut(BROKEN),), 3, ["cut off", UNCONFIRMED], "its part may still run"),
        (
            (SupervisorTimedOut(BROKEN), Unreachable(BROKEN)),
            3,
            ["cut off", UNCONFIRMED],
            "its part may still run",
        ),
        (
            (Malformed(ProtocolError("wrong")),),
            3,
            ["malformed answer: wrong", UNCONFIRMED],
            "do not trust",
        ),
        ((ENDED, Malformed(ProtocolError("wrong"))), 3, ["malformed answer"], "do not trust"),
    ],
)
def test_what_happens_to_a_host_after_its_workers_finished(
    played: Played, events: tuple[LinkEvent, ...], code: int, said: list[str], hint: str
) -> None:
    played.finishes("first")
    played.happens("first", *events)
    played.finishes("second")
    played.happens("second", ENDED)
    report = played.report
    assert (report.exit_code, report.reason) == (code, "all 2 workers finished")
    assert len(report.problems) == len(said), report.problems
    for part, problem in zip(said, report.problems, strict=True):
        assert part in problem
    assert hint in report.hint
    assert bool(hint) is bool(report.hint)


@pytest.mark.parametrize("connected", [True, False])
def test_a_host_that_does_not_confirm_its_cleanup_in_time(
    played: Played, *, connected: bool
) -> None:
    for host in ("first", "second"):
        played.finishes(host)
    played.happens("second", ENDED)
    if not connected:
        played.happens("first", Unreachable(BROKEN))
    played.give_up()
    assert played.report.exit_code == (ExitCode.NODE_FAILED if connected else ExitCode.OK)
    (problem,) = played.report.problems
    assert problem.startswith(UNCONFIRMED)


@pytest.mark.parametrize("events", [CUT_OFF, (DIED,), (messages.Ended(1.0, (SURVIVOR,)),)])
def test_a_host_that_had_finished_is_not_blamed_for_another(
    played: Played, events: tuple[LinkEvent, ...]
) -> None:
    played.finishes("first")
    played.happens("first", *events)
    played.happens("second", DIED)
    assert (played.report.exit_code, played.report.reason) == (3, "second failed")


def test_a_supervisor_that_dies_before_its_workers_have_finished(played: Played) -> None:
    played.happens("first", DIED)
    played.happens("second", ENDED)
    report = played.report
    assert (report.exit_code, report.reason) == (ExitCode.NODE_FAILED, "first failed")
    assert report.hint.endswith("its workers were killed too")
    assert report.problems == ("first: running the job: the supervisor died",)
    assert played.attempt.uncleaned() == []


def test_why_a_launcher_that_is_gone_stopped_the_job(played: Played) -> None:
    silent = "no output and no progress from any worker for 2 s"
    played.happens("first", messages.Stopping(1.0, silent, asked=True))
    worker = machine.WorkerId("first", "worker", 0)
    played.attempt._handle(Post(machine.WorkerExited(worker, failed=True)))
    played.happens("first", ENDED)
    played.happens("second", ENDED)
    assert played.report.reason == f"an earlier launcher stopped the job: {silent}"
    assert played.report.problems == ()


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (messages.Lost("the supervisor died", (SURVIVOR,)), "the supervisor died"),
        (messages.Ended(1.0, (SURVIVOR,), "a fault"), "the supervisor on the host failed: a fault"),
    ],
)
def test_processes_that_survive_do_not_hide_why_a_host_failed(
    played: Played, event: LinkEvent, cause: str
) -> None:
    played.happens("first", event)
    played.happens("second", ENDED)
    assert played.report.problems == (
        f"first: running the job: {cause}\nprocesses survive KILL: python3 (pid 9)",
    )
    assert played.attempt.uncleaned() == ["first"]


def test_the_cause_of_a_stop_is_sought_once_for_all_hosts(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 20 ms, in which the commands to later hosts would wait."""
    sought: list[AttemptState] = []
    reason = Ending.reason

    def noting(ending: Ending, state: AttemptState, failures: tuple[Failure, ...]) -> str:
        sought.append(state)
        return reason(ending, state, failures)

    monkeypatch.setattr(Ending, "reason", noting)
    worker = machine.WorkerId("first", "worker", 0)
    played.posts.put(Post(machine.WorkerExited(worker, failed=True)))
    played.happens("second")
    assert all(link.state.stopping for link in played.attempt._links.values())
    assert len(sought) == 1


@pytest.mark.parametrize(
    ("message", "problems"),
    [
        ("RuntimeError: Connection closed by peer", ("rank 0 on first had exited with status 0",)),
        ("ValueError: bad batch", ()),
    ],
)
def test_a_worker_that_ended_too_early_without_an_error(
    played: Played, message: str, problems: tuple[str, ...]
) -> None:
    """Only its peers fail, and each blames its connection."""
    exited = messages.Exited(1.0, "worker", 0, 0, 7, 0, None, stopping=False)
    played.attempt._links["first"].evidence.add(exited)
    failure = Failure("second", "worker", 1, 1, 2.0, code=1, message=message)
    worker = machine.WorkerId("second", "worker", 1)
    played.posts.put(Post(machine.WorkerExited(worker, failed=True), failures=(failure,)))
    played.happens("first", ENDED)
    played.happens("second", ENDED)
    assert played.report.problems == problems
