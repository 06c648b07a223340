"""No process of the job runs before `start`, and an aborted launch leaves nothing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from dtrain.node.programs import program
from support.limits import until
from support.node import Agent, Node

CALLED_OFF: dict[str, Callable[[Agent], object]] = {
    "abort": lambda agent: (agent.command("abort"), agent.expect("bye"), agent.wait()),
    "stop": lambda agent: (agent.command("stop"), agent.expect("bye"), agent.wait()),
    "end of input": lambda agent: (agent.close_stdin(), agent.wait()),
    "killed relay": lambda agent: agent.kill(),
}


@pytest.mark.parametrize("how", CALLED_OFF)
def test_an_aborted_prepared_launch_leaves_nothing(host: Node, how: str) -> None:
    agent = host.launch(
        host.shell("touch started"), setup=["setsid sleep 600 &", "echo done > setup-done"]
    )
    agent.expect("prepared")
    CALLED_OFF[how](agent)
    assert "lost" not in [message["type"] for message in agent.messages]
    host.until_nothing_runs()
    until(lambda: not host.run_dir.exists())
    assert (host.workdir / "setup-done").exists()
    assert not (host.workdir / "started").exists()


@pytest.mark.parametrize("how", CALLED_OFF)
def test_an_aborted_launch_with_a_hanging_setup_leaves_nothing(host: Node, how: str) -> None:
    hang = "echo > hanging; setsid sleep 600 & trap '' TERM HUP; sleep 600; sleep 600"
    agent = host.launch(host.shell("touch started"), setup=["true", hang])
    until((host.workdir / "hanging").exists)
    agent.command("ping")
    CALLED_OFF[how](agent)
    host.until_nothing_runs()
    until(lambda: not host.run_dir.exists())
    assert not (host.workdir / "started").exists()


def test_a_launcher_that_vanishes_while_setup_hangs_leaves_nothing(host: Node) -> None:
    """It has lost its power: the connection stays open, and no command comes."""
    impatient = program("agent").replace(b"ALONE = 60", b"ALONE = 1")
    assert impatient != program("agent")
    agent = host.agent(source=impatient)
    host.launch(host.shell("touch started"), setup=["sleep 600"], lease=0.0, agent=agent)
    assert agent.wait_for_end() == -signal.SIGALRM
    host.until_nothing_runs()
    until(lambda: not host.run_dir.exists())


def test_a_prepared_launch_waits_for_a_paused_launcher(host: Node) -> None:
    """As long as its lease, although the relay of a running job would have ended before."""
    impatient = program("agent").replace(b"ALONE = 60", b"ALONE = 1")
    impatient = impatient.replace(b"START_WITHIN = 60.0", b"START_WITHIN = 0.5")
    agent = host.agent(source=impatient)
    host.launch(host.shell("touch started"), lease=1.0, agent=agent)
    agent.expect("prepared")
    assert agent.expect("refused")["reason"].startswith("no launcher for 1.5 seconds")
    host.until_nothing_runs()
    until(lambda: not host.run_dir.exists())


def test_a_relay_that_takes_over_starts_a_prepared_launch(host: Node) -> None:
    """The network was cut just before the start, and the host has not noticed it."""
    first = host.launch(host.shell("echo started"))
    first.expect("prepared")
    second = host.attach(previous=first.pid)
    second.expect("attached")
    assert first.wait_for_end() == -signal.SIGKILL
    second.command("start")
    second.event("ended")
    assert second.text("worker-0.out") == "started\n"


def test_an_abort_that_arrives_with_the_prepared_launch(host: Node) -> None:
    """The relay has not run for a while, and gets both at once."""
    wait = "touch waits; until rm go; do sleep 0.01; done 2>/dev/null; rm waits"
    for number in range(8):
        run = f"run{number}"
        agent = host.launch(host.shell("touch started"), run=run, setup=[wait])
        until((host.workdir / "waits").exists)
        os.kill(agent.pid, signal.SIGSTOP)
        (host.workdir / "go").touch()
        record = host.folder(run) / "supervisor"
        until(lambda record=record: record.exists() and record.read_bytes())
        agent.command("abort")
        os.kill(agent.pid, signal.SIGCONT)
        agent.expect("bye")
    host.until_nothing_runs()
    assert not host.run_dir.exists()


def test_a_relay_killed_at_any_moment_leaves_nothing(host: Node) -> None:
    """No process of the job or of setup, at any point of the launch."""
    for moment in range(0, 100, 4):
        agent = host.launch(
            host.shell("sleep 600"), run=f"run{moment}", setup=["setsid sleep 600 & sleep 0.02"]
        )
        agent.expect("hello")
        threading.Event().wait(moment / 1000)
        agent.kill()
    host.until_nothing_runs()
    until(lambda: not [path for path in host.run_dir.rglob("*") if path.name != "nodes"])


def test_folders_that_setup_makes_in_the_run_folder_go_too(host: Node) -> None:
    """Otherwise the launch could not try another port: its name would be in use."""
    (host.workdir / "kept").mkdir()
    make = 'cd "$DTRAIN_RUN_DIR" && mkdir -p env/bin && ln -s "$OLDPWD/kept" env/kept && cd - '
    for _ in range(2):
        agent = host.launch(host.shell("true"), setup=[make])
        agent.expect("prepared")
        agent.command("abort")
        agent.expect("bye")
        assert not host.run_dir.exists()
    assert (host.workdir / "kept").is_dir()


def test_an_agent_without_a_command_leaves_nothing(host: Node) -> None:
    agent = host.agent()
    agent.expect("hello")
    agent.close_stdin()
    assert agent.wait() == 0
    assert not host.run_dir.exists()


def test_sigterm_ends_a_prepared_supervisor(host: Node) -> None:
    agent = host.launch(host.shell("touch started"))
    agent.expect("prepared")
    (pid,) = host.processes("dtrain-supervisor\0run\0node0")
    os.kill(pid, signal.SIGTERM)
    assert agent.expect("refused")["reason"] == "stopped by SIGTERM"
    host.until_nothing_runs()
    until(lambda: not host.run_dir.exists())


def test_existing_folders_stay(host: Node) -> None:
    host.run_dir.mkdir()
    agent = host.launch(host.shell("exit"))
    agent.expect("prepared")
    other = host.launch(host.shell("exit"), host="node1")
    other.expect("prepared")
    agent.command("abort")
    agent.expect("bye")
    assert not host.folder().exists()
    assert host.folder(host="node1").is_dir()
    other.command("abort")
    other.expect("bye")
    assert host.run_dir.is_dir()
    assert list(host.run_dir.iterdir()) == []


def test_aborting_a_refused_launch_does_not_affect_a_run_of_the_same_name(host: Node) -> None:
    first = host.start(host.shell("echo ready; exec sleep 600"))
    first.until(lambda: first.text("worker-0.out"))
    for _ in range(5):
        second = host.launch(host.shell("touch started"))
        second.command("abort")
        second.wait()
        assert second.messages[-1]["type"] in ("refused", "bye")
    assert [event["event"] for event in first.events] == ["started"]
    assert host.folder().is_dir()
    first.command("kill")
    assert first.event("exited")["signal"] == "SIGKILL"
    first.wait()
