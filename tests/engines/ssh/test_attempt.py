"""An attempt whose launcher is interrupted, slow, or without a free thread."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dtrain.diagnostics import AuthError, ConnectError, ExitCode, HostKeyError, NodeError
from dtrain.engines.ssh import host_state, machine, outage
from dtrain.engines.ssh import link as link_module
from dtrain.engines.ssh.attempt import Attempt
from dtrain.engines.ssh.context import AttemptContext
from dtrain.engines.ssh.host_events import Post, StopWorkers
from dtrain.engines.ssh.link import Link
from dtrain.engines.ssh.readiness import Spares
from dtrain.messages import agent as messages
from dtrain.node import protocol
from dtrain.node.agent.wire import PREAMBLE, encode
from dtrain.runs import events
from dtrain.runs.journal import JournalReader
from dtrain.session.relays.liveness import PingLimit
from dtrain.session.reporting.recorder import MAX_NOTICES
from dtrain.session.stopping.control import Force
from dtrain.spec.model import Host
from support.attempts import GONE, HELLO, TWO_HOSTS, context_of
from support.limits import HANG, until
from support.scripted import ScriptedHosts, ScriptedProcess, SilentHost, relay_stdout


def test_an_interrupt_while_the_links_start_closes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = SilentHost()
    launch = Link.launch

    def interrupted(link: Link) -> None:
        if link.host == "second":
            assert hosts.opened.wait(HANG)
            raise KeyboardInterrupt
        launch(link)

    monkeypatch.setattr(Link, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Attempt(context_of(hosts, tmp_path), lambda: None).run()
    assert hosts.closed.wait(HANG)


def test_a_host_that_never_answers_gets_its_reason(tmp_path: Path) -> None:
    """As if a login script waited for a key."""
    context = context_of(SilentHost(), tmp_path)
    attempt = Attempt(context, lambda: None)
    run = threading.Thread(target=attempt.run)
    run.start()
    until(lambda: all(link.is_silent for link in attempt._links.values()))
    attempt._late_notice_at = 0.0
    why = "if a login to first takes as long, a login script waits there"
    journal = context.folder.journal
    until(lambda: journal.exists() and why in journal.read_text())
    for force in (Force.TERM, Force.KILL, Force.GIVE_UP):
        attempt.interrupt("Ctrl-C", force)
    run.join(HANG)
    assert not run.is_alive()


def test_an_answer_that_has_arrived_comes_before_the_time_limit(tmp_path: Path) -> None:
    attempt = Attempt(context_of(SilentHost(), tmp_path), lambda: None)
    attempt._act([machine.SetAlarm(0.0)])  # as if this process was stopped (SIGSTOP) until now
    attempt._context.posts.put(Post(machine.HostEnded("first")))
    assert attempt._next().event == machine.HostEnded("first")
    assert attempt._next().event == machine.Alarm()


@pytest.mark.parametrize(("said", "lost"), [((), True), ((HELLO, GONE), False)])
def test_the_end_of_a_relay_without_a_free_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: tuple[object, ...], *, lost: bool
) -> None:
    start, begun = threading.Thread.start, threading.Event()

    def refuse_the_second(thread: threading.Thread) -> None:
        if thread.name == "first reader" and begun.is_set():
            raise RuntimeError("can't start new thread")
        start(thread)

    class Relay(ScriptedProcess):
        def follow(self, receive: object) -> None:
            begun.set()
            super().follow(receive)  # type: ignore[arg-type]

    class Hosts(ScriptedHosts):
        def connect(self, host: Host) -> Hosts:
            return self

        def start(self, command: str) -> ScriptedProcess:
            return Relay(relay_stdout(map(encode, said)))

    monkeypatch.setattr(threading.Thread, "start", refuse_the_second)
    context = context_of(Hosts({}), tmp_path)
    link = Link(context, context.plan.hosts[0])
    link.attach({}, ())
    assert begun.wait(HANG)
    assert link.drained(HANG)
    link.close()
    link.disconnect(0.0)
    found = [context.posts.get_nowait() for _ in range(context.posts.qsize())]
    failed = [one.problem for one in found if isinstance(one.event, machine.LauncherFailed)]
    assert [one.exit_code for one in failed if one] == [ExitCode.NODE_FAILED] * lost


Reported = list[tuple[float, messages.Happened]]


def reported(index: int, *, code: int = 0, ended: bool = False) -> Reported:
    events: list[messages.Event] = [
        messages.Started(1.0, "worker", index, index, 7),
        messages.Exited(1.0, "worker", index, index, 7, code, None, stopping=False),
        *[messages.Ended(1.0, ())] * ended,
    ]
    return [(2.0, messages.Happened(place, event)) for place, event in enumerate(events, 1)]


@pytest.mark.parametrize("known", [True, False])
def test_what_an_earlier_launcher_knew_of_lost_hosts_counts(tmp_path: Path, *, known: bool) -> None:
    hosts = {"first": 0, "second": 1}
    said = relay_stdout(map(encode, (HELLO, GONE)))
    context = context_of(ScriptedHosts(dict.fromkeys(hosts, said)), tmp_path)
    attempt = Attempt(context, lambda: None)
    known_events = {host: reported(index) for host, index in hosts.items()} if known else {}
    report = attempt.attach({host: {} for host in hosts}, known_events, age=1.0)
    assert report.exit_code == (ExitCode.OK if known else ExitCode.NODE_FAILED)
    assert attempt.uncleaned() == []


class Unreachable(ScriptedHosts):
    """Hosts that refuse the first connection; none is expected to be tried twice."""

    def __init__(self) -> None:
        self._tried: set[str] = set()

    def connect(self, host: Host) -> ScriptedHosts:
        assert host.name not in self._tried
        self._tried.add(host.name)
        raise ConnectError(host.name, "connecting", "connection refused")


@pytest.mark.parametrize("code", [0, 7])
def test_a_host_whose_end_is_known_is_not_waited_for(tmp_path: Path, code: int) -> None:
    known = {"first": reported(0, ended=True), "second": reported(1, code=code, ended=True)}
    context = context_of(Unreachable(), tmp_path)
    attempt = Attempt(context, lambda: None)
    report = attempt.attach({key: {} for key in known}, known, age=1.0)
    if code:
        assert report.exit_code == ExitCode.JOB_FAILED
        assert report.reason == "rank 1 on second exited with status 7"
        assert report.failures[0].time == 2.0  # on this machine's clock
    else:
        assert (report.exit_code, report.reason) == (ExitCode.OK, "all 2 workers finished")
    (problem,) = report.problems
    assert problem.startswith("first,second: receiving the end of the output: connection refused")
    assert attempt.uncleaned() == []


def test_a_host_that_is_back_after_the_launcher_stood_still_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-Z during an outage, which is over before the launcher goes on."""
    now = [1000.0]

    class Back(ScriptedHosts):
        def connect(self, host: Host) -> ScriptedHosts:
            if now[0] == 1000.0:
                now[0] += 3600
                raise ConnectError(host.name, "connecting", "no answer within 15 s")
            return super().connect(host)

    monkeypatch.setattr(link_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    context = context_of(Back({"first": relay_stdout(map(encode, (HELLO, GONE)))}), tmp_path)
    link = Link(context, context.plan.hosts[0])
    link.attach({}, ())
    assert link.drained(HANG)
    link.close()
    link.disconnect(0.0)
    found = [context.posts.get_nowait().event for _ in range(context.posts.qsize())]
    assert found == [machine.HostEnded("first")]


def test_a_host_is_not_overdue_once_the_launcher_reaches_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was overdue in an outage of the launcher's own network, whose time does not count."""
    now, found, tried = [1000.0], [], threading.Semaphore(0)
    context = context_of(ScriptedHosts({}), tmp_path)

    class Dead(ScriptedHosts):
        def connect(self, host: Host) -> ScriptedHosts:
            found.append(link.overdue is not None)
            if len(found) == 3:
                context.contact.made(now[0], 300)
            now[0] += 400 * (len(found) < 3)
            tried.release()
            raise ConnectError(host.name, "connecting", "no answer within 15 s")

    monkeypatch.setattr(outage, "DELAY", 0.01)
    monkeypatch.setattr(link_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    context = replace(context, transport=Dead({}))
    link = Link(context, context.plan.hosts[0])
    link.attach({}, ())
    for _ in range(4):
        assert tried.acquire(timeout=HANG)
    link.close()
    link.disconnect(0.0)
    assert link.drained(HANG)
    assert found[:4] == [False, False, True, False]


class Refusing(ScriptedHosts):
    """A host where no relay starts."""

    def __init__(self, connecting: NodeError | None, starting: NodeError | None = None) -> None:
        super().__init__({})
        self._connecting, self._starting = connecting, starting

    def connect(self, host: Host) -> Refusing:
        if self._connecting is not None:
            raise self._connecting
        return self

    def start(self, command: str) -> ScriptedProcess:
        assert self._starting is not None
        raise self._starting


def refused(*, asked: bool = False, jump: str = "") -> AuthError:
    error = AuthError("first", "logging in", "it refused every key")
    error.asked, error.jump = asked, jump
    return error


@pytest.mark.parametrize(
    ("hosts", "why"),
    [
        (Refusing(ConnectError("first", "connecting", "refused")), "may have lost its network"),
        (Refusing(refused(jump="bastion")), "bastion let no connection through"),
        (Refusing(refused(asked=True)), "a login needs the answer of its user"),
        (Refusing(HostKeyError("first", "connecting", "its host key has changed")), ""),
        (Refusing(refused()), ""),
        (Refusing(None, ConnectError("first", "starting a command", "no memory")), ""),
    ],
)
def test_only_a_launcher_that_no_host_answers_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: Refusing, why: str
) -> None:
    monkeypatch.setattr(outage, "REFUSED_DELAY", 0.25)
    file = TWO_HOSTS.replace(", second", "").replace("py}", "py, restart: {node_timeout: 1s}}")
    attempt = Attempt(context_of(hosts, tmp_path, file), lambda: None)
    report = attempt.attach({"first": {}}, {}, age=1.0)
    assert attempt.left is bool(why)
    assert ("no host could be reached" in report.reason) is bool(why)
    assert report.reason.endswith(why)


def second_attempt(hosts: ScriptedHosts, folder: Path) -> AttemptContext:
    """On one host, on which the first attempt ran the job."""
    context = context_of(hosts, folder, TWO_HOSTS.replace(", second", ""))
    plan = replace(context.plan, attempt=2)
    return replace(context, plan=plan, proven_hosts=frozenset({"first"}))


REFUSED = refused()


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (ConnectError("first", "connecting", "connection refused"), "cannot be reached"),
        (REFUSED, "is not ready (it refused every key)"),
    ],
)
def test_an_interrupt_ends_the_wait_for_a_host_that_restarts(
    tmp_path: Path, error: NodeError, what: str
) -> None:
    context = second_attempt(Refusing(error), tmp_path)
    attempt, reports = Attempt(context, lambda: None), []
    run = threading.Thread(target=lambda: reports.append(attempt.run()))
    run.start()
    until(lambda: f"first {what}; waiting for it" in "".join(notices_of(context)))
    attempt.interrupt("Ctrl-C", Force.TERM)
    run.join(HANG)
    assert [report.exit_code for report in reports] == [ExitCode.INTERRUPTED]
    assert notices_of(context)[-1] == "Ctrl-C: stopping; attempt 2 was not started"


def test_a_host_that_is_not_ready_after_a_restart_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First it refuses the key, then it has no Python. A relay starts only after that."""
    monkeypatch.setattr(outage, "REFUSED_DELAY", 0.01)

    class Restarting(ScriptedHosts):
        logins = programs = 0

        def connect(self, host: Host) -> Restarting:
            self.logins += 1
            if self.logins == 1:
                raise REFUSED
            return self

        def start(self, command: str) -> ScriptedProcess:
            self.programs += 1
            return Missing() if self.programs == 1 else ScriptedProcess(said)

    class Missing(ScriptedProcess):
        def __init__(self) -> None:
            super().__init__(b"")

        def wait(self, timeout: float | None = None) -> int:
            return 127

    said = relay_stdout(map(encode, (HELLO, {**GONE, "what": "workdir"})))
    host = Restarting({})
    context = second_attempt(host, tmp_path)
    report = Attempt(context, lambda: None).run()
    assert [text.partition(";")[0] for text in notices_of(context)] == [
        "first is not ready (it refused every key)",
        "first is not ready (there is no python3)",
    ]
    assert (host.logins, host.programs) == (3, 3)
    assert report.problems == ("first: preparing the job: no run",)


def test_of_two_hosts_that_restart_a_spare_replaces_one(tmp_path: Path) -> None:
    """The next attempt waits for the other one, if necessary."""

    class Off(ScriptedHosts):
        def connect(self, host: Host) -> Off:
            raise ConnectError(host.name, "connecting", "connection refused")

    context = context_of(Off({}), tmp_path)
    plan, both = replace(context.plan, attempt=2), frozenset({"first", "second"})
    context = replace(context, plan=plan, proven_hosts=both, spares=Spares(1))
    attempt = Attempt(context, lambda: None)
    attempt.run()
    assert len(attempt.result().lost) == 1
    (notice,) = notices_of(context)
    assert "waiting for it" in notice


def test_a_login_that_a_host_refuses_is_repeated_only_for_a_host_that_has_run_the_job(
    tmp_path: Path,
) -> None:
    context = replace(second_attempt(Refusing(REFUSED), tmp_path), proven_hosts=frozenset())
    assert Attempt(context, lambda: None).run().problems == (str(REFUSED),)


def test_a_login_that_has_asked_the_user_is_not_repeated(tmp_path: Path) -> None:
    error = refused(asked=True)
    attempt = Attempt(second_attempt(Refusing(error), tmp_path), lambda: None)
    assert attempt.run().problems == (str(error),)
    assert attempt.result().lost == {"first"}  # a spare can replace it


def notices_of(context: AttemptContext) -> list[str]:
    journal = context.folder.journal
    shown = JournalReader(journal).read() if journal.exists() else ()
    return [event.text for _, event in shown if isinstance(event, events.NoticeShown)]


def notices_after(
    attempts: int, tried: threading.Semaphore, hosts: ScriptedHosts, folder: Path
) -> list[str]:
    """What a link to the running job on the host ``first`` tells in so many attempts."""
    context = context_of(hosts, folder)
    link = Link(context, context.plan.hosts[0])
    link.attach({}, ())
    for _ in range(attempts):
        assert tried.acquire(timeout=HANG)
    link.close()
    link.disconnect(0.0)
    assert link.drained(HANG)
    return notices_of(context)


def test_another_host_key_is_told_while_the_job_goes_on(tmp_path: Path) -> None:
    """It would be one more host that cannot be reached, and may be an attack."""
    refused = threading.Semaphore(0)

    class Impostor(ScriptedHosts):
        def connect(self, host: Host) -> Impostor:
            refused.release()
            raise HostKeyError(host.name, "connecting", "its host key has changed")

    notices = notices_after(2, refused, Impostor({}), tmp_path)
    assert notices == ["first: connecting: its host key has changed; trying again"]


def test_a_login_without_a_shell_is_told_while_the_job_goes_on(tmp_path: Path) -> None:
    """A relay never starts there, and a later one may: the account is set right again."""
    tried, said = threading.Semaphore(0), b"This account is currently not available."

    class Disabled(ScriptedHosts):
        def connect(self, host: Host) -> ScriptedHosts:
            tried.release()
            return super().connect(host)

    (notice,) = notices_after(3, tried, Disabled({"first": said}), tmp_path)
    assert notice.startswith("first: running the agent: ")
    assert notice.endswith(f"{said.decode()}; trying again")


class LastWords(ScriptedHosts, ScriptedProcess):
    """Its relay reports a dead supervisor, and then sends output once the launcher waits for it."""

    words = b"last words"

    def __init__(self) -> None:
        self.awaited = threading.Event()
        attached = {"type": "attached"}
        stream = {"type": "stream", "id": 1, "name": "worker-0.out"}
        died = {"type": "lost", "reason": "the supervisor died"}
        self._said = memoryview(relay_stdout(map(encode, (HELLO, attached, stream, died))))
        data = protocol.HEADER.pack(protocol.DATA, 1, 0, len(self.words)) + self.words
        self._last = data + relay_stdout([encode({"type": "bye"})]).removeprefix(PREAMBLE)

    def connect(self, host: Host) -> LastWords:
        return self

    def start(self, command: str) -> LastWords:
        return self

    def read(self, size: int = 1 << 18) -> bytes:
        if not self._said:
            assert self.awaited.wait(HANG)
            self._said, self._last = memoryview(self._last), b""
        return super().read(size)

    def close(self) -> None:
        self._last = b""
        self.awaited.set()


def test_the_output_of_a_host_whose_supervisor_died_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, drained = LastWords(), Link.drained

    def wait(link: Link, timeout: float) -> bool:
        hosts.awaited.set()
        return drained(link, timeout)

    monkeypatch.setattr(Link, "drained", wait)
    context = context_of(hosts, tmp_path, TWO_HOSTS.replace(", second", ""))
    report = Attempt(context, lambda: None).attach({"first": {}}, {}, age=1.0)
    assert report.reason == "first failed"
    assert (tmp_path / "logs" / "first" / "worker-0.out").read_bytes() == LastWords.words


def test_a_notice_that_each_relay_and_attempt_repeats_is_shown_once(tmp_path: Path) -> None:
    said = {"type": "notice", "text": "worker-0.out was truncated"}
    many = [said] * (MAX_NOTICES + 2)
    hosts = ScriptedHosts({"first": relay_stdout(map(encode, (HELLO, *many, GONE)))})
    context = context_of(hosts, tmp_path)
    for _attempt in range(2):
        link = Link(context, context.plan.hosts[0])
        link.attach({}, ())
        assert link.drained(HANG)
        link.close()
        link.disconnect(0.0)
    journal = context.folder.journal.read_text()
    assert (journal.count("was truncated"), journal.count("are hidden")) == (1, 0)


def test_a_host_that_is_to_stop_has_less_time_to_answer(tmp_path: Path) -> None:
    context = context_of(SilentHost(), tmp_path)
    link = Link(context, context.plan.hosts[0])
    link.state = host_state.attached(link.host)
    assert link._patience() == PingLimit.NORMAL
    link.step(StopWorkers(10.0, "Ctrl-C"))
    assert link._patience() == PingLimit.STOPPING == 2
