"""An attempt whose launcher is interrupted, slow, or without a free thread."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import pytest

from dtrain.diagnostics import ExitCode
from dtrain.engines.ssh import machine
from dtrain.engines.ssh.attempt import Attempt
from dtrain.engines.ssh.context import AttemptContext
from dtrain.engines.ssh.host_events import Post
from dtrain.engines.ssh.link import Link
from dtrain.launchplan.plan import build
from dtrain.node.agent.wire import VERSION, encode
from dtrain.runs.log_store import RunFolder
from dtrain.session.observer import NullObserver
from dtrain.session.recorder import Recorder
from dtrain.session.steps import StepWatch
from dtrain.spec.load import parse
from dtrain.spec.model import Host
from support.limits import HANG
from support.scripted import ScriptedHosts, ScriptedProcess, relay_stdout

FILE = "cluster: {hosts: [first, second], gpus: 1}\njob: {framework: none, script: train.py}\n"
HELLO = {
    "type": "hello", "protocol": VERSION, "python": "3.11.2", "hostname": "h", "time": 0.0, "pid": 7
}  # fmt: skip
GONE = {"type": "refused", "what": "gone", "reason": "no run", "hint": ""}


def context_of(
    transport: ScriptedHosts, folder: Path, posts: queue.SimpleQueue[Post]
) -> AttemptContext:
    plan = build(parse(FILE, "cluster.yaml"))
    place = RunFolder(folder)
    return AttemptContext(
        name="run",
        plan=plan,
        attempt=1,
        movable_port=False,
        base=folder,
        secrets={},
        transport=transport,
        tree=None,
        folder=place,
        recorder=Recorder(place, NullObserver()),
        inspection=None,
        tensorboard=False,
        post=posts.put,
        steps=StepWatch(plan.world_size),
    )


class Silent(ScriptedHosts, ScriptedProcess):
    """Hosts whose only connection is open until it is closed."""

    def __init__(self) -> None:
        self.opened, self.closed = threading.Event(), threading.Event()

    def connect(self, host: Host) -> Silent:
        self.opened.set()
        return self

    def start(self, command: str) -> Silent:
        return self

    def read(self, size: int = 1 << 18) -> bytes:
        assert self.closed.wait(HANG)
        return b""

    def close(self) -> None:
        self.closed.set()


def test_an_interrupt_while_the_links_start_closes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, posts = Silent(), queue.SimpleQueue[Post]()
    launch = Link.launch

    def interrupted(link: Link) -> None:
        if link.host == "second":
            assert hosts.opened.wait(HANG)
            raise KeyboardInterrupt
        launch(link)

    monkeypatch.setattr(Link, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Attempt(context_of(hosts, tmp_path, posts), posts, lambda: None).run()
    assert hosts.closed.wait(HANG)


def test_an_answer_that_has_arrived_comes_before_the_time_limit(tmp_path: Path) -> None:
    posts = queue.SimpleQueue[Post]()
    attempt = Attempt(context_of(Silent(), tmp_path, posts), posts, lambda: None)
    attempt._act(machine.SetAlarm(0.0))  # as if this process was stopped (SIGSTOP) until now
    posts.put(Post(machine.HostEnded("first")))
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
    posts = queue.SimpleQueue[Post]()
    context = context_of(Hosts({}), tmp_path, posts)
    link = Link(context, context.plan.hosts[0])
    link.attach({})
    assert begun.wait(HANG)
    assert link.drained(HANG)
    link.close()
    link.disconnect(0.0)
    found = [posts.get_nowait() for _ in range(posts.qsize())]
    failed = [one.problem for one in found if isinstance(one.event, machine.LauncherFailed)]
    assert [one.exit_code for one in failed if one] == [ExitCode.NODE_FAILED] * lost
