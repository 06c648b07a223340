"""The threads that read from the API server: what they report, and that nothing ends them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain.diagnostics import ConnectError, PrepareError
from dtrain.engines.kubernetes import reading
from dtrain.engines.kubernetes.client import ForbiddenError, NotFoundError
from dtrain.engines.kubernetes.line_stream import MAX_LINE, QuietError
from dtrain.engines.kubernetes.lines import Cursor
from dtrain.engines.kubernetes.reading import (
    RECOVERED,
    LogEnded,
    LogProblem,
    PodEvent,
    PodLines,
    PodsListed,
    Readers,
    ServerNotice,
    Warned,
)
from dtrain.engines.kubernetes.routines import InThread, Pause
from support.kubernetes.stub_stream import StubStream
from support.limits import HANG

Answer = Callable[[], Generator[list[bytes]]]
BEGIN = b"2026-11-22T10:00:00.4Z [dtrain] begins\n"
AGAIN = b"2026-11-22T10:00:00.6Z [dtrain] begins\n"
LINE = b"2026-11-22T10:00:00.5Z [worker-0] hello\n"
NEW = PodLines("uid", (b"[worker-0] hello\n",), 1795341600_500000000, 1, 1795341600_500000000)
NO_WATCH = b"failed to create fsnotify watcher: too many open files"


def one_line() -> Generator[list[bytes]]:
    yield [LINE]


def raises(error: Exception) -> Answer:
    def answer() -> Generator[list[bytes]]:
        raise error
        yield []

    return answer


def first() -> Generator[list[bytes]]:
    yield [BEGIN, LINE]


def second() -> Generator[list[bytes]]:
    yield [AGAIN, LINE.replace(b".5", b".7")]


gone = raises(NotFoundError("server", "GET log", "no such pod"))
down = raises(ConnectError("server", "GET log", "connection refused"))


def no_watch() -> Generator[list[bytes]]:
    yield [LINE, NO_WATCH]


def cut() -> Generator[list[bytes]]:
    yield [LINE, b"2026-11-22T10:0"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(reading, "LAST_DELAY", 0.01)
    monkeypatch.setattr(reading, "REREAD_SECONDS", 0.01)


none = raises(PrepareError("server", "GET log", "previous terminated container not found"))


class Server:
    """Gives each answer once, and keeps what was asked."""

    host = "server"

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.empty = threading.Event()

    def stream(self, path: str, **query: Any) -> StubStream:
        self.asked.append(query)
        answer = self._answers.pop(0)
        if not self._answers:
            self.empty.set()
        return StubStream(answer())

    def request(self, method: str, path: str, **query: Any) -> dict[str, Any]:
        return {"metadata": {"resourceVersion": "5"}, "items": []}


def failed(why: str) -> ServerNotice:
    return ServerNotice(f"{why}; the job goes on, trying again")


def readers(server: Server) -> Readers:
    client: Any = server
    launched: Any = SimpleNamespace(
        selector="", name="job", restarts_containers=True, state=lambda: None
    )
    return Readers(client, launched)


def first_events(followed: Readers, count: int, *kinds: type[PodEvent]) -> list[PodEvent]:
    """The first events of ``kinds`` that the readers report."""
    followed.start()
    found: list[PodEvent] = []
    while len(found) < count:
        event = followed.events.get(timeout=HANG)
        if isinstance(event, kinds):
            found.append(event)
    followed.stop()
    return found


def test_pauses_between_questions_for_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short again after an answer, and after a defect, which must not keep a processor busy."""
    monkeypatch.setattr(reading, "FIRST_DELAY", 1.0)
    monkeypatch.setattr(reading, "LAST_DELAY", 15.0)
    down = ConnectError("server", "GET job", "connection refused")
    answers: list[Exception | None] = [down, down, None, down, ValueError("a defect"), None]
    followed = readers(Server(one_line))
    routine = followed._run_to_end("job", "job", followed._ask_for_job)
    wait, found = next(routine), []
    while answers:
        assert isinstance(wait, InThread)
        error = answers.pop(0)
        wait = routine.throw(error) if error else routine.send(None)
        assert isinstance(wait, Pause)
        found.append(wait.seconds)
        wait = routine.send(False)
    often = reading.JOB_SECONDS
    assert found == [1, 2, often, 1, 15, often]


def events_of_log(server: Server, *, over: bool = False) -> list[PodEvent]:
    """The events of one pod whose container ends once it is ``over``, or at the last answer."""
    followed = readers(server)
    ended = server.empty
    if over:
        ended = threading.Event()
        ended.set()
    pod: Any = SimpleNamespace(name="pod", uid="uid")
    followed.read_log(pod, Cursor(), ended)
    events = [followed.events.get(timeout=HANG)]
    while not isinstance(events[-1], LogEnded):
        events.append(followed.events.get(timeout=HANG))
    followed.stop()
    return events


@pytest.mark.parametrize(
    ("answers", "whole"),
    [
        ([one_line], True),
        ([gone], False),
        ([one_line, gone], False),
    ],
)
def test_the_end_of_a_log(answers: list[Answer], whole: bool) -> None:
    events = events_of_log(Server(*answers), over=len(answers) == 1)
    assert events == [*([NEW] if one_line in answers else []), LogEnded("uid", whole)]


def lines_of(events: list[PodEvent]) -> list[bytes]:
    return [line for event in events if isinstance(event, PodLines) for line in event.lines]


@pytest.mark.parametrize(
    ("answers", "previous"),
    [
        ([first, none], [False, True]),
        # The container was started again before its log was read,
        ([second, first, first], [False, True, True]),
        # or while it was read.
        ([first, none, second, first, first], [False, True, False, True, True]),
    ],
)
def test_the_log_of_the_container_that_ended_first_is_read(
    answers: list[Answer], previous: list[bool]
) -> None:
    server = Server(*answers)
    *found, ended = events_of_log(server, over=len(answers) == 2)
    assert lines_of(found) == [b"[dtrain] begins\n", b"[worker-0] hello\n"]
    assert ended == LogEnded("uid", True)
    assert ["previous" in query for query in server.asked] == previous


def test_lines_before_a_question_without_an_answer_are_kept() -> None:
    """Whether a container was started again, which its first line asks."""

    def both() -> Generator[list[bytes]]:
        yield [LINE, AGAIN]

    found = events_of_log(Server(both, down, both, none), over=True)
    assert lines_of(found) == [b"[worker-0] hello\n", b"[dtrain] begins\n"]


def test_what_a_kubelet_writes_instead_of_a_log_is_no_line() -> None:
    """It cannot follow the log, so the log is read without."""
    server = Server(no_watch, one_line)
    problem = LogProblem("uid", NO_WATCH.decode())
    assert events_of_log(server, over=True) == [problem, NEW, LogEnded("uid", True)]
    assert [query["follow"] for query in server.asked] == ["true", "false"]
    assert events_of_log(Server(no_watch, no_watch), over=True)[-1] == LogEnded("uid", False)


def test_a_stream_that_ends_within_a_line_is_no_message_of_the_kubelet() -> None:
    assert events_of_log(Server(cut, one_line), over=True) == [NEW, LogEnded("uid", True)]


def test_a_line_that_is_cut_is_reported() -> None:
    """Another program than the script wrote it."""
    stamp = LINE.partition(b" ")[0]

    def long() -> Generator[list[bytes]]:
        yield [b"%s %s\n" % (stamp, b"x" * MAX_LINE)]

    problem, found, _ = events_of_log(Server(long), over=True)
    assert problem == LogProblem("uid", "a line is cut after 1,048,576 bytes")
    assert isinstance(found, PodLines)
    assert found.lines == (b"x" * (MAX_LINE - len(stamp) - 1) + b"\n",)


def test_trouble_with_a_log_is_over_when_the_log_is() -> None:
    """Later trouble shows again."""
    *_, recovered, ended = found = events_of_log(Server(down, down, gone))
    assert isinstance(found[0], ServerNotice)
    assert (recovered, ended) == (RECOVERED, LogEnded("uid", False))


def test_a_stream_that_can_be_opened_again_is_no_trouble() -> None:
    assert events_of_log(Server(down, one_line, down, gone)) == [NEW, LogEnded("uid", False)]


def test_a_missing_permission_to_read_logs_is_reported() -> None:
    forbidden = raises(ForbiddenError("server", "GET log", "pods/log is forbidden"))
    trouble, *_ = events_of_log(Server(forbidden, gone))
    assert trouble == failed("server: GET log: pods/log is forbidden")


def test_a_log_that_may_not_be_read_ends_with_its_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the pause before the next attempt is: a stop would last as long."""
    for name in ("FIRST_DELAY", "LAST_DELAY"):
        monkeypatch.setattr(reading, name, 2 * HANG)
    forbidden = raises(ForbiddenError("server", "GET log", "pods/log is forbidden"))
    followed, over = readers(Server(forbidden, forbidden)), threading.Event()
    pod: Any = SimpleNamespace(name="pod", uid="uid")
    followed.read_log(pod, Cursor(), over)
    assert isinstance(followed.events.get(timeout=HANG), ServerNotice)
    over.set()
    assert followed.events.get(timeout=HANG) == LogEnded("uid", False)


def test_a_worker_that_writes_nothing_is_no_trouble() -> None:
    quiet = raises(QuietError("server", "GET log", "timed out"))
    assert events_of_log(Server(quiet, gone)) == [LogEnded("uid", False)]


def test_an_exception_that_nobody_expects_is_reported_and_ends_no_reader() -> None:
    found = events_of_log(Server(raises(ZeroDivisionError("x")), one_line), over=True)
    assert found[0] == failed("reading pod failed: ZeroDivisionError: x")
    assert [event for event in found[1:] if event != RECOVERED] == [NEW, LogEnded("uid", True)]


@pytest.mark.parametrize(
    ("code", "expected"),
    [(410, PodsListed(())), (500, failed("server: watching the pods: why"))],
)
def test_a_watch_that_the_server_ends_with_an_error(code: int, expected: PodEvent) -> None:
    def error() -> Generator[list[bytes]]:
        status = {"kind": "Status", "code": code, "message": "why"}
        yield [json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"]

    followed = readers(Server(error, *[down] * 1000))
    assert first_events(followed, 2, PodsListed, ServerNotice) == [PodsListed(()), expected]


def test_a_user_who_may_list_pods_and_not_watch_them_is_told_once() -> None:
    def forbidden(path: str, **query: Any) -> Any:
        raise ForbiddenError("server", "GET pods", "cannot watch pods")

    server: Any = Server()
    server.stream = forbidden
    followed = readers(server)
    listed, trouble = PodsListed(()), failed("server: GET pods: cannot watch pods")
    found = first_events(followed, 4, PodsListed, ServerNotice)
    assert found == [listed, trouble, listed, listed]


def test_why_a_job_has_no_pods() -> None:
    """The JobSet has failed to create the Job, or the Job its pods."""
    server: Any = Server(*[down] * 1000)

    def request(method: str, path: str, *, fieldSelector: str = "", **_: str) -> dict[str, Any]:
        name = fieldSelector.removeprefix("involvedObject.name=")
        return {"items": [{"type": "Warning", "reason": "FailedCreate", "message": name}]}

    server.request = request
    followed = readers(server)
    followed.pods_missing = True
    warned = first_events(followed, 2, Warned)
    assert warned == [Warned("FailedCreate: job"), Warned("FailedCreate: job-node-0")]
