"""Links wait for each other while their hosts are checked."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.checks import Finding
from dtrain.diagnostics import ConnectError
from dtrain.engines.ssh.inspection import Inspection
from dtrain.launchplan.build import build
from dtrain.launchplan.plan import LaunchPlan
from dtrain.node import protocol
from dtrain.node.agent.wire import VERSION
from dtrain.node.facts.wire import PREAMBLE
from dtrain.session.facts.conversation import Conversation
from dtrain.session.facts.everywhere import in_thread
from dtrain.session.facts.gather_order import QUICK
from dtrain.session.facts.preflight import Preflight
from dtrain.session.relays.relay import RelayChannel
from dtrain.spec.load import parse
from dtrain.transport import node_program
from dtrain.transport.incoming import Incoming
from dtrain.transport.local import LocalConnection, LocalProcess, LocalTransport
from support.limits import HANG, until
from support.scripted import ScriptedHosts, ScriptedProcess

FAKE = Path(__file__).parent / "fakes" / "torch-2.13.0"
FILE = """
cluster: {hosts: [here, there, gone], gpus: 0, transport: local}
job: {framework: torch, script: SCRIPT, env: {PYTHONPATH: FAKE}}
"""


def plan(script: Path) -> LaunchPlan:
    text = FILE.replace("SCRIPT", str(script)).replace("FAKE", str(FAKE))
    return build(parse(text, "cluster.yaml"), run="run", local_python="python3")


def inspect(script: Path, *, close: bool = False) -> tuple[Inspection, list[bool], list[Finding]]:
    """Two of three hosts arrive. The third one never does, or all are released before."""
    found: list[Finding] = []

    def report(findings: Sequence[Finding]) -> None:
        found.extend(findings)

    plan_ = plan(script)
    inspection = Inspection(plan_, ["here", "there"], base=script.parent, report=report)
    assert inspection.late == {"here", "there", "gone"}
    connections = [LocalTransport().connect(part.host) for part in plan_.hosts[:2]]
    with ThreadPoolExecutor() as pool:
        waiting = [
            pool.submit(inspection.check_host, part.host.name, connection)
            for part, connection in zip(plan_.hosts, connections, strict=False)
        ]
        if close:
            inspection.close()
        else:
            inspection.drop("gone")
        answers = [one.result(HANG) for one in waiting]
    for connection in connections:
        connection.close()
    return inspection, answers, found


def test_no_link_waits_for_a_host_that_cannot_arrive(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    inspection, answers, found = inspect(script)
    assert answers == [False, False]
    assert found == []
    assert inspection.late == frozenset()


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("script: run.sh", "run.sh"),
        ("command: [./run.sh]", "./run.sh"),
        ("command: [bash, -x, run.sh, --fast]", "run.sh"),
        ("command: [bash, -c, cd x && torchrun --nnodes 2 a.py]", "job.command"),
        ("command: [bash, -ec, torchrun --nnodes 2 prepare.sh]", "job.command"),
        ("command: [bash, -Ec, torchrun --nnodes 2 a.py]", "job.command"),
        ("command: [bash, -lc, ./run.sh]", "./run.sh"),
        ("command: [python, a.py, run.sh]", None),
        ("command: [python, a.py, --prompt, how to start torchrun --nnodes 2]", None),
    ],
)
@pytest.mark.parametrize("sync", ["", ", sync: {source: .}"])
def test_a_shell_script_is_searched_for_launchers_however_it_is_started(
    tmp_path: Path, program: str, name: str | None, sync: str
) -> None:
    (tmp_path / "run.sh").write_text("torchrun --nnodes 2 a.py\n")
    where = sync or f", workdir: {tmp_path}"
    text = (
        "cluster: {hosts: [here], gpus: 0, slots: 2, transport: local}\n"
        f"job: {{framework: torch, {program}{where}}}"
    )
    plan_ = build(parse(text, "cluster.yaml"), run="run", local_python=sys.executable)
    found: list[Finding] = []
    inspection = Inspection(plan_, ["here"], base=tmp_path, report=found.extend)
    with contextlib.closing(LocalTransport().connect(plan_.hosts[0].host)) as connection:
        inspection.check_host("here", connection)
    wanted = [f"{name} starts torchrun, and each host runs it 2 times"] if name else []
    assert [one.seen for one in found if one.subject == "script"] == wanted


@pytest.mark.parametrize("program", ["script: /opt/run.sh", "command: [bash, /opt/run.sh]"])
def test_a_shell_script_in_an_image_is_not_one_of_the_hosts(program: str) -> None:
    text = "cluster: {hosts: [a], gpus: 2}\njob: {framework: torch, %s, container: {image: x}}"
    plan_ = build(parse(text % program, "cluster.yaml"))
    assert (plan_.shell_script, plan_.script_on_host) == (None, None)


class Noting(LocalConnection):
    """A connection that notes its first command."""

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self.started = threading.Event()

    def start(self, command: str) -> LocalProcess:
        self.started.set()
        return super().start(command)


def test_a_host_gathers_facts_before_the_others_have_connected(tmp_path: Path) -> None:
    inspection = Inspection(plan(tmp_path / "train.py"), [], base=tmp_path, report=list)
    connection = Noting("here")
    with ThreadPoolExecutor() as pool:
        checking = pool.submit(inspection.check_host, "here", connection)
        try:
            assert connection.started.wait(HANG)
        finally:
            inspection.close()
        assert not checking.result(HANG)
    connection.close()


def test_one_error_stops_all(tmp_path: Path) -> None:
    inspection, answers, found = inspect(tmp_path / "gone.py")
    assert answers == [False, False]
    assert [one.subject for one in found] == ["script"]
    assert inspection.errors == tuple(found)
    assert inspection.failing_newcomers == {"here", "there"}


def test_waiting_links_can_be_released(tmp_path: Path) -> None:
    inspection, answers, found = inspect(tmp_path / "train.py", close=True)
    assert answers == [False, False]
    assert found == []
    assert inspection.errors == ()


def test_the_process_of_a_check_becomes_the_relay(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    plan_ = replace(plan(tmp_path / "train.py"), hosts=plan(tmp_path / "train.py").hosts[:1])
    inspection = Inspection(plan_, ["here"], base=tmp_path, report=list)
    connection = LocalTransport().connect(plan_.hosts[0].host)
    assert inspection.check_host("here", connection)
    inspection.drop("here")  # a failure after the check waits for nothing
    process = inspection.relays["here"]
    look = {
        "op": "look", "protocol": VERSION, "run": "run", "host": "here", "trust_group": None,
        "containers": None, "interval": 0.1,
    }  # fmt: skip
    process.write(protocol.encode_command({**look, "run_dir": str(tmp_path)}))
    frames = list(RelayChannel("here", connection, process, "python3").frames())
    assert [one.body["type"] for one in frames if isinstance(one, protocol.Message)] == [
        "hello",
        "status",
    ]
    assert process.wait(HANG) == 0
    connection.close()


def test_a_launch_that_ends_during_its_check_leaves_no_process(tmp_path: Path) -> None:
    plan_ = plan(tmp_path / "train.py")
    connection = LocalTransport().connect(plan_.hosts[0].host)
    conversation = Conversation(plan_.hosts[0], connection, "run")
    conversation.begin(["python3"])
    assert conversation.release() is None  # it has not answered anything
    process = conversation._process
    assert process is not None
    process.close_stdin()
    assert process.wait(HANG) == 0
    connection.close()


@pytest.mark.parametrize("name", ["facts", "launch"])
def test_a_check_whose_order_is_cut_leaves_no_process(name: str) -> None:
    process = node_program.start(LocalConnection("here"), name, sys.executable, label="check")
    process.write(b'{"op": "clo')
    process.close_stdin()
    with ThreadPoolExecutor() as pool:
        output = pool.submit(lambda: b"".join(iter(process.read, b"")))
        try:
            assert output.result(HANG) == PREAMBLE  # every process of the check keeps it open
        finally:
            process.close()


def test_the_end_of_a_check_does_not_wait_for_a_host_that_reads_nothing(tmp_path: Path) -> None:
    connection = LocalConnection("here")
    process = connection.start("exec sleep 600")
    conversation = Conversation(plan(tmp_path / "train.py").hosts[0], connection)
    conversation._process, conversation._incoming = process, Incoming(process)
    order = {"op": "clock", "more": "than a pipe takes" * (1 << 16)}
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(conversation.ask, order, dict)
        until(process._write_lock.locked)
        closing = pool.submit(conversation.close, 0.0)
        try:
            closing.result(HANG)
            assert isinstance(asking.exception(HANG), ConnectError)
        finally:
            connection.close()
            process._popen.kill()


class Hanging(ScriptedHosts, ScriptedProcess):
    """A connection, and its process that writes nothing until it is closed."""

    def __init__(self) -> None:
        self.read_begins, self.closed = threading.Event(), threading.Event()

    def start(self, command: str) -> ScriptedProcess:
        return self

    def read(self, size: int = 1 << 18) -> bytes:
        self.read_begins.set()
        assert self.closed.wait(HANG)
        return b""

    def close(self) -> None:
        self.closed.set()


def test_a_check_names_hosts_whose_login_scripts_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtrain.session.facts.everywhere.WAITING", 0.0)
    host, plan_ = Hanging(), plan(tmp_path / "train.py")
    notices: list[str] = []

    def run(name: str, call: Callable[[], None]) -> None:
        in_thread(call)
        assert host.read_begins.wait(HANG)

    def notice(text: str) -> None:
        notices.append(text)
        host.close()

    Preflight(plan_, lambda part: host, base=tmp_path, run=run, notice=notice).look(QUICK)
    assert "a login script waits there" in notices[0]


def test_the_end_of_a_check_releases_a_host_whose_program_does_not_start(tmp_path: Path) -> None:
    host, plan_ = Hanging(), plan(tmp_path / "train.py")
    preflight = Preflight(plan_, lambda part: host, base=tmp_path)
    with ThreadPoolExecutor() as pool:
        looking = pool.submit(preflight.look, QUICK)
        assert host.read_begins.wait(HANG)
        preflight.close()
        assert host.closed.is_set()
        assert len(looking.result(HANG).failures) == len(plan_.hosts)
