"""Ending a run ends all of its processes, however they try to escape, and no others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from typing import Any

import pytest

from dtrain.node.agent.control import machine_id
from dtrain.node.agent.processes import look
from dtrain.node.boot import framed
from dtrain.node.programs import boot_command, program
from dtrain.node.protocol import encode_command
from support.limits import HANG, until
from support.node import Agent, Node, patient
from support.traced import traced

# Each creates `ready` once it has escaped.
READY = "import os,signal,sys,time\ndef ready(name='ready'): open(name,'w').close()\n"

# Ends in a process with the forged tag of another run.
FORGED = """
def forge(folder):
    if os.fork() == 0:
        os.setsid()
        if os.fork(): os._exit(0)
        tag = {'DTRAIN_RUN_ID': 'other', 'DTRAIN_HOST': 'elsewhere', 'DTRAIN_RUN_DIR': folder}
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);" \\
            "open('ready', 'w').close(); time.sleep(600)"
        os.execve(sys.executable, [sys.executable, '-ISc', code, MARK], tag)
    time.sleep(600)
"""

ESCAPES = {
    "ignores TERM": "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); time.sleep(600)",
    "is stopped": "ready(); os.kill(os.getpid(), signal.SIGSTOP)",
    "new session": """
if os.fork() == 0:
    os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN); ready()
time.sleep(600)
""",
    "double fork": """
if os.fork() == 0:
    os.setsid()
    if os.fork(): os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN); ready()
time.sleep(600)
""",
    "cleared environment": """
if os.fork() == 0:
    os.setsid()
    if os.fork(): os._exit(0)
    code = "import time; open('ready','w').close(); time.sleep(600)"
    os.execve(sys.executable, [sys.executable, '-ISc', code, MARK], {})
time.sleep(600)
""",
    "orphan of a dead worker": """
if os.fork() == 0:
    os.setsid(); ready(); time.sleep(600)
os.kill(os.getpid(), signal.SIGKILL)
""",
    "many generations": """
for generation in range(30):
    if os.fork():
        time.sleep(600)
    os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready(); time.sleep(600)
""",
    "forged tag": FORGED + "forge('/nowhere')",
    "forged tag of a run whose supervisor lives": FORGED
    + "forge(os.environ['DTRAIN_RUN_DIR'] + '/.')",
    "forged tag with a broken record": FORGED
    + """
os.mkdir('run'); open('run/supervisor', 'w').write('[' * 50000)
forge('run')
""",
    "forged tag with a pipe as a record": FORGED
    + """
os.mkdir('run'); os.mkfifo('run/supervisor')
forge('run')
""",
    # Doubles until there are 64, each replacing children that die.
    "fork bomb": """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for doubling in range(6): os.fork()
ready()
children = set()
while True:
    while len(children) < 1:
        pid = os.fork()
        if pid == 0: time.sleep(0.02); os._exit(0)
        children.add(pid)
    children.discard(os.wait()[0])
""",
    # Forks into a new process and session every few milliseconds.
    "runs from process to process": """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    for hop in range(1000000):
        if os.fork(): os._exit(0)
        os.setsid()
        if hop == 5: ready()
        time.sleep(0.003)
time.sleep(600)
""",
}


@pytest.mark.parametrize("way", ["stop", "kill"])
@pytest.mark.parametrize("escape", ESCAPES)
def test_no_process_escapes(host: Node, escape: str, way: str) -> None:
    source = READY + ESCAPES[escape].replace("MARK", repr(host.mark))
    # Another worker keeps the run alive if the first one exits.
    agent = host.start(host.code(source, 0), host.shell("exec sleep 600", 1))
    until((host.workdir / "ready").exists)
    agent.command(way, grace=0.2)
    ended = agent.event("ended")
    assert ended["survivors"] == []
    assert agent.wait() == 0
    assert host.processes() == {}


def test_processes_get_sigterm_before_sigkill(host: Node) -> None:
    polite = "trap 'echo asked; exit 7' TERM; echo ready; while :; do sleep 0.05; done"
    agent = host.start(host.shell(polite, 0), host.shell(polite, 1))
    agent.until(lambda: agent.text("worker-0.out") and agent.text("worker-1.out"))
    agent.command("stop", grace=HANG)
    for index in (0, 1):
        exited = agent.event("exited", index=index)
        assert (exited["code"], exited["stopping"]) == (7, True)
    stopping = agent.event("stopping")
    assert (stopping["reason"], stopping["asked"]) == ("asked by the launcher", True)
    agent.wait()
    assert agent.text("worker-0.out") == "ready\nasked\n"


def test_a_kill_shortens_a_stop(host: Node) -> None:
    agent = host.start(host.shell("trap '' TERM; echo ready; while :; do sleep 1; done"))
    agent.until(lambda: agent.text("worker-0.out"))
    agent.command("stop", grace=600)
    agent.event("stopping")
    agent.command("kill")
    assert agent.event("exited")["signal"] == "SIGKILL"
    agent.wait()
    assert host.processes() == {}


def test_leftovers_of_workers_are_ended_with_the_last_worker(host: Node) -> None:
    agent = host.start(host.shell("setsid sleep 600 & setsid sleep 600 & exit 0"))
    agent.wait()
    assert [event["event"] for event in agent.events] == ["started", "exited", "ended"]
    assert host.processes() == {}


def test_leftovers_of_setup_are_ended(host: Node) -> None:
    agent = host.start(host.shell("exit 0"), setup=["setsid sleep 600 &", "sleep 600 &"])
    agent.wait()
    assert host.processes() == {}


def test_another_run_is_not_touched(host: Node) -> None:
    first = host.start(host.shell("echo ready; exec sleep 600"), run="first")
    second = host.start(host.shell("echo ready; exec sleep 600"), run="second")
    third = host.start(host.shell("echo ready; exec sleep 600"), run="first", host="node1")
    for agent in (first, second, third):
        agent.until(lambda agent=agent: agent.text("worker-0.out"))
    first.command("stop", grace=0.1)
    first.wait()
    for agent in (second, third):
        pid = agent.event("started")["pid"]
        os.kill(pid, 0)
        assert [event["event"] for event in agent.events] == ["started"]
        agent.command("kill")
        agent.wait()
    assert host.processes() == {}


def test_a_process_with_a_similar_tag_is_not_touched(host: Node) -> None:
    tag = {"DTRAIN_RUN_ID": "run", "DTRAIN_HOST": "node0", "DTRAIN_RUN_DIR": str(host.folder())}
    for environment in (
        {"DTRAIN_RUN_ID": "run"},
        {**tag, "DTRAIN_HOST": "node00"},
        {**tag, "DTRAIN_RUN_ID": "run2"},
        {**tag, "DTRAIN_RUN_DIR": f"{host.folder()}/"},
        {"NOT_DTRAIN_RUN_ID": "run", **{name: tag[name] for name in list(tag)[1:]}},
        {"X" + name: f"{name}={value}" for name, value in tag.items()},
    ):
        with subprocess.Popen(["sleep", "600"], env={**os.environ, **environment}) as bystander:
            try:
                agent = host.start(host.shell("sleep 600"), run="run")
                agent.command("kill")
                agent.wait()
                assert bystander.poll() is None, environment
            finally:
                bystander.kill()
        for path in host.folder().iterdir():
            path.unlink()
        host.folder().rmdir()


def test_runs_of_the_same_name_in_different_folders_are_different_runs(host: Node) -> None:
    first = host.start(host.shell("echo ready; exec sleep 600"))
    first.until(lambda: first.text("worker-0.out"))
    second = host.start(host.shell("sleep 600"), run_dir=f"{host.run_dir}2")
    second.command("kill")
    second.wait()
    assert host.processes("sleep")
    first.command("kill")
    first.wait()
    assert host.processes() == {}


def test_a_child_without_the_whole_tag_is_still_a_child(host: Node) -> None:
    hide = "env -u DTRAIN_HOST setsid sleep 600 & DTRAIN_RUN_ID=x setsid sleep 600 &"
    agent = host.start(host.shell(f"{hide} echo ready; wait"))
    agent.until(lambda: agent.text("worker-0.out"))
    agent.command("kill")
    agent.wait()
    assert host.processes() == {}


def test_a_run_inside_a_run_is_not_touched(host: Node) -> None:
    """The inner launcher and relay belong to the outer run; the inner job does not."""
    # Nor does a process of the inner job with a cleared environment.
    hidden = f"env -i setsid {host.python} -ISc 'import time; time.sleep(601)' {host.mark} &"
    inner = host.shell(hidden + " echo > inner-ready; wait")
    request = host.request(inner, run="inner", on_disconnect="keep")
    (host.workdir / "input").write_bytes(framed(program("agent")) + encode_command(request))
    launcher = f"""
import subprocess, threading
relay = subprocess.Popen(["sh", "-c", {boot_command(host.python, "inner")!r}],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
relay.stdin.write(open("input", "rb").read()); relay.stdin.flush()
seen = b""
while b"prepared" not in seen: seen += relay.stdout.read1(4096)
relay.stdin.write(b'{{"op":"start"}}\\n'); relay.stdin.flush()
while relay.stdout.read1(4096): pass
"""
    hopper = READY + ESCAPES["runs from process to process"]
    outer = host.start(host.code(launcher), host.code(hopper, 1), run="outer")
    for name in ("inner-ready", "ready"):
        until((host.workdir / name).exists)
    running = until(
        lambda: {pid for pid, words in host.processes().items() if "sleep(601)" in words}
    )
    outer.command("kill")
    assert outer.event("ended")["survivors"] == []
    outer.wait()
    assert running <= set(host.processes())
    assert not host.processes("for hop in")
    attached = host.attach("inner")
    attached.expect("attached")
    attached.command("kill")
    assert attached.event("ended")["survivors"] == []
    attached.wait()
    host.until_nothing_runs()


def test_sigterm_to_the_supervisor_stops_the_job(host: Node) -> None:
    agent = host.start(host.shell("trap 'exit 5' TERM; echo ready; while :; do sleep 0.05; done"))
    agent.until(lambda: agent.text("worker-0.out"))
    os.kill(supervisor_pid(host), signal.SIGTERM)
    stopping = agent.event("stopping")
    assert (stopping["reason"], stopping["asked"]) == ("the supervisor got SIGTERM", False)
    assert agent.event("exited")["code"] == 5
    agent.wait()
    assert host.processes() == {}


def test_the_job_ends_with_a_killed_supervisor(host: Node) -> None:
    agent = host.start(
        host.shell("setsid sleep 600 & trap '' TERM; echo ready; while :; do sleep 1; done"),
        host.code(READY + ESCAPES["runs from process to process"], 1),
    )
    agent.until(lambda: agent.text("worker-0.out"))
    until((host.workdir / "ready").exists)
    os.kill(supervisor_pid(host), signal.SIGKILL)
    lost = agent.expect("lost")
    assert lost["reason"] == "the supervisor died: killed by SIGKILL"
    assert lost["survivors"] == []
    agent.expect("bye")
    agent.wait()
    assert host.processes() == {}


def test_pings_are_answered_until_the_processes_of_a_killed_supervisor_have_ended(
    host: Node,
) -> None:
    """The launcher gives up a relay that answers no pings."""
    endless = patient().replace(b"PATIENCE = 10.0", b"PATIENCE = %d" % HANG)
    assert endless != patient()
    agent = host.launch(host.shell("exec sleep 600"), agent=host.agent(source=endless))
    agent.expect("prepared")
    agent.command("start")
    worker = agent.event("started")["pid"]
    supervisor = supervisor_pid(host)
    with traced(worker, hold=True) as tracer:
        os.kill(supervisor, signal.SIGSTOP)
        silent = until(lambda: (alive := ping(agent))["silent"] > 0.2 and alive)["silent"]
        os.kill(supervisor, signal.SIGKILL)
        until(lambda: (now := look(worker)) and not now.alive)
        # The relay waits until it can reap the worker. It soon knows that the supervisor is dead,
        # not silent.
        until(lambda: ping(agent)["silent"] < silent)
        for _ in range(3):
            assert ping(agent)["silent"] < silent
        assert not [one for one in agent.messages if one["type"] == "lost"]
        tracer.kill()
        assert agent.expect("lost")["survivors"] == []
    agent.expect("bye")
    assert host.processes() == {}


def ping(agent: Agent) -> dict[str, Any]:
    """The relay's answer."""

    def answers() -> list[dict[str, Any]]:
        return [one for one in agent.messages if one["type"] == "alive"]

    before = len(answers())
    agent.command("ping")
    answer: dict[str, Any] = agent.until(lambda: answers()[before:])[0]
    return answer


def test_a_supervisor_killed_without_a_relay_is_reported_lost(host: Node) -> None:
    agent = host.start(host.shell("setsid sleep 600 & echo ready; wait"))
    agent.until(lambda: agent.text("worker-0.out"))
    agent.kill()
    os.kill(supervisor_pid(host), signal.SIGKILL)
    attached = host.attach()
    assert attached.expect("lost")["survivors"] == []
    attached.expect("bye")
    assert attached.text("worker-0.out") == "ready\n"
    assert host.processes() == {}


def test_a_restart_of_the_machine_is_named(host: Node) -> None:
    """No test restarts this machine: the record is changed instead."""
    agent = host.start(host.shell("echo ready; sleep 600"))
    agent.until(lambda: agent.text("worker-0.out"))
    agent.kill()
    supervisor = supervisor_pid(host)
    os.kill(supervisor, signal.SIGKILL)
    # Until it is gone, it may accept a connection.
    until(lambda: (process := look(supervisor)) is None or not process.alive)
    record = host.folder() / "supervisor"
    record.write_text(record.read_text().replace(machine_id(), "another boot"))
    lost = host.attach().expect("lost")
    assert lost["reason"] == "the machine was restarted, or this is another machine"
    assert "journalctl --boot=-1" in lost["hint"]


def test_what_survived_the_end_of_the_run_is_ended_later(host: Node) -> None:
    agent = host.start(host.shell("env -0 > environment"))
    agent.event("ended", survivors=[])
    agent.expect("bye")
    agent.wait()
    before = (host.workdir / "environment").read_text().rstrip("\0").split("\0")
    survivor = subprocess.Popen(["sleep", "600"], env=dict(one.split("=", 1) for one in before))
    try:
        # No process survives KILL on request: the record is changed instead.
        events = host.folder() / "events"
        named = b'[{"pid":%d,"name":"sleep"}]' % survivor.pid
        events.write_bytes(re.sub(rb'(?<="survivors":) ?\[\]', named, events.read_bytes()))
        attached = host.attach(outputs=False)
        assert attached.event("ended")["survivors"]
        assert attached.expect("lost")["survivors"] == []
        attached.expect("bye")
        assert survivor.wait(HANG) == -signal.SIGKILL
    finally:
        survivor.kill()
        survivor.wait()


def supervisor_pid(host: Node) -> int:
    found = [pid for pid, words in host.processes().items() if "dtrain-supervisor" in words]
    assert len(found) == 1
    return found[0]
