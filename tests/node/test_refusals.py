"""A host that refuses a job reports the reason and a remedy, and keeps no files of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain.node.agent.events import MAX_EVENTS, EventReader, Events
from dtrain.node.agent.folder import expand
from dtrain.node.facts.files import expand as expand_in_check
from support.disks import mount
from support.node import Agent, Node, node
from support.ports import free_port, loopbacks

USER = pwd.getpwuid(os.getuid())


def refusal(host: Node, agent: Agent) -> dict[str, Any]:
    body = agent.expect("refused")
    assert agent.wait() == 0
    assert agent.stderr == b""
    host.until_nothing_runs()
    assert not host.run_dir.exists()
    return body


@pytest.mark.parametrize(
    ("home", "path", "folder"),
    [
        ("/home/me", "~", "/home/me"),
        ("/home/me", "~/runs", "/home/me/runs"),
        ("/home/me", "runs", "/home/me/runs"),
        ("/home/me", f"~{USER.pw_name}/runs", f"{USER.pw_dir}/runs"),
        ("/home/me", "~of-nobody/runs", "/home/me/~of-nobody/runs"),
        ("/home/me", "/data/../runs", "/runs"),
        ("/", "~/runs", "/runs"),
    ],
)
def test_a_launch_and_a_check_mean_the_same_folder(
    home: str, path: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", home)
    assert expand(path) == os.fsencode(folder)
    assert expand_in_check(path) == folder


def test_an_interpreter_that_is_not_on_path(host: Node) -> None:
    worker = host.process(["python9", "train.py"])
    agent = host.launch(worker, python="python9", environment={"PATH": "/nowhere:/usr/bin"})
    body = refusal(host, agent)
    assert body["what"] == "python"
    assert body["reason"] == "python python9 not found on PATH (/nowhere:/usr/bin)"
    assert "cluster.python" in body["hint"]


def test_an_interpreter_that_does_not_exist(host: Node) -> None:
    body = refusal(host, host.launch(host.process(["/x/python"]), python="/x/python"))
    assert (body["what"], body["reason"]) == ("python", "python /x/python not found on this host")


def test_setup_decides_which_interpreter_is_found(host: Node) -> None:
    bin_folder = host.workdir / "venv" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "mypython").write_text('#!/bin/sh\necho "$0"\n')
    (bin_folder / "mypython").chmod(0o700)
    agent = host.start(
        host.process(["mypython"]), python="mypython", setup=['export PATH="$PWD/venv/bin:$PATH"']
    )
    agent.wait()
    assert agent.text("worker-0.out") == f"{bin_folder}/mypython\n"


def test_a_failing_setup_line(host: Node) -> None:
    setup = ["echo fine", "echo first >&2; echo last; (exit 5)", "echo never"]
    body = refusal(host, host.launch(host.shell("exit"), setup=setup))
    assert body["what"] == "setup"
    assert body["reason"] == f"setup line 2 ({setup[1]}) failed with status 5"
    remedy, _, output = body["hint"].partition("\n")
    assert remedy == "run the line on the host and correct it; the setup lines printed:"
    assert output == "fine\nfirst\nlast"


def test_a_setup_line_with_a_program_that_is_not_on_path(host: Node) -> None:
    body = refusal(host, host.launch(host.shell("exit"), setup=["no-such-program sync"]))
    assert body["reason"] == "setup line 1 (no-such-program sync) failed with status 127"
    assert "not found" in body["hint"]
    assert "whole path" in body["hint"]
    assert "`. /etc/profile` for `module`" in body["hint"]


@pytest.mark.parametrize("line", ["exit 0", "exec true", "kill -9 $$", "set -u; echo $nope"])
def test_a_setup_line_that_ends_the_shell(host: Node, line: str) -> None:
    body = refusal(host, host.launch(host.shell("exit"), setup=["true", line]))
    assert (body["what"], body["reason"]) == ("setup", f"setup line 2 ({line}) ended the shell")


def test_a_setup_line_that_is_not_shell(host: Node) -> None:
    body = refusal(host, host.launch(host.shell("exit"), setup=["for x in"]))
    assert body["what"] == "setup"
    assert "syntax error" in body["hint"]


def test_a_missing_working_folder(host: Node) -> None:
    body = refusal(host, host.launch(host.shell("exit"), workdir=f"{host.workdir}/no/such"))
    assert (body["what"], body["reason"]) == (
        "workdir",
        f"workdir {host.workdir}/no/such not found",
    )
    assert "job.sync" in body["hint"]


def test_a_working_folder_that_is_a_file(host: Node) -> None:
    (host.workdir / "file").touch()
    body = refusal(host, host.launch(host.shell("exit"), workdir=f"{host.workdir}/file"))
    assert body["reason"] == f"workdir {host.workdir}/file is not a folder"


def test_a_missing_script(host: Node) -> None:
    body = refusal(host, host.launch(host.shell("exit"), script="train.py"))
    assert body["what"] == "script"
    assert body["reason"] == f"script train.py not found in {host.workdir}"
    assert "job.workdir" in body["hint"]


@pytest.mark.parametrize("address", ["", *loopbacks()])
def test_a_port_that_a_process_listens_on(host: Node, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        port = server.getsockname()[1]
        body = refusal(host, host.launch(host.shell("exit"), ports=[port]))
    assert body["what"] == "port"
    assert body["reason"].startswith(f"port {port} is taken by process {os.getpid()} (")
    assert "job.rendezvous.port" in body["hint"]


def test_a_port_of_another_run(host: Node) -> None:
    """Reserved as soon as the run is prepared, even while no worker listens."""
    port = free_port()
    first = host.launch(host.shell("exit"), run="first", ports=[port])
    first.expect("prepared")
    refused = f"port {port} is taken by an unknown process that is not listening, "
    second = host.launch(host.shell("exit"), run="second", ports=[port])
    assert second.expect("refused")["reason"].startswith(refused)
    first.command("abort")
    first.expect("bye")
    first.wait()
    third = host.start(host.shell("exec sleep 3600"), run="third", ports=[port])
    fourth = host.launch(host.shell("exit"), run="fourth", ports=[port])
    assert fourth.expect("refused")["reason"].startswith(refused)
    third.command("kill")
    third.wait()
    host.launch(host.shell("exit"), run="fifth", ports=[port]).expect("prepared")


def test_a_worker_listens_on_a_reserved_port(host: Node) -> None:
    port = free_port()
    serve = f"import socket; socket.create_server(('', {port})); print('up')"
    agent = host.start(host.process([sys.executable, "-c", serve]), ports=[port])
    agent.wait()
    assert agent.text("worker-0.out") == "up\n"


def test_closed_connections_of_an_earlier_job_do_not_keep_a_port(host: Node) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as server:
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first keeps the port in TIME_WAIT
        assert client.recv(1) == b""
        client.close()
    host.launch(host.shell("exit"), ports=[port]).expect("prepared")


@pytest.fixture
def stranger() -> Iterator[Callable[[str], None]]:
    """Runs Python code as another user until the test ends. Returns once the code has run."""
    nobody = pwd.getpwnam("nobody")
    become_nobody = f"import os, socket; os.setgid({nobody.pw_gid}); os.setuid({nobody.pw_uid})"
    with contextlib.ExitStack() as processes:

        def run(code: str) -> None:
            process = subprocess.Popen(
                [sys.executable, "-c", f"{become_nobody}\n{code}\nprint(flush=True); input()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            processes.enter_context(process)
            processes.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"

        yield run


def test_a_port_of_another_user(host: Node, stranger: Callable[[str], None]) -> None:
    port = free_port()
    stranger(f"server = socket.create_server(('', {port}))")
    body = refusal(host, host.launch(host.shell("exit"), ports=[port]))
    assert re.fullmatch(
        rf"(?s)port {port} is taken by process \d+ \(.*\) of user nobody", body["reason"]
    )


def test_abstract_sockets_of_another_user_take_no_port(
    host: Node, stranger: Callable[[str], None]
) -> None:
    port = free_port()
    stranger(
        "held = [socket.socket(socket.AF_UNIX) for _ in range(500)]\n"
        f"for number, sock in enumerate(held, {port} - 250):\n"
        "    sock.bind('\\0dtrain-port/%d' % number); sock.listen()"
    )
    host.launch(host.shell("exit"), ports=[port]).expect("prepared")
    with open("/proc/net/unix") as sockets:
        own = [line for line in sockets if str(port) in line.partition("@")[2]]
    assert len(own) == 1  # the stranger's


def test_a_run_of_the_same_name(host: Node) -> None:
    host.launch(host.shell("exit")).expect("prepared")
    second = host.launch(host.shell("exit"))
    body = second.expect("refused")
    assert body["what"] == "agent"
    assert "already been launched" in body["reason"]
    assert host.folder().is_dir()


def test_a_run_folder_below_a_file(host: Node) -> None:
    (host.workdir / "file").touch()
    agent = host.launch(host.shell("exit"), run_dir=f"{host.workdir}/file/x")
    body = agent.expect("refused")
    assert body["what"] == "permission"
    assert body["reason"] == f"{host.workdir}/file: Not a directory"
    assert "cluster.run_dir" in body["hint"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 17 MiB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=17m", "dtrain", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.parametrize("left", [0, 4096, 8 << 20])
def test_a_full_disk(host: Node, small_disk: Path, left: int) -> None:
    disk = os.statvfs(small_disk)
    (small_disk / "ballast").write_bytes(b"\0" * (disk.f_bavail * disk.f_frsize - left))
    run_dir = small_disk / "runs"
    agent = host.launch(host.shell("exit"), run_dir=str(run_dir))
    body = agent.expect("refused")
    agent.wait()
    assert body["what"] == "disk"
    assert str(run_dir) in body["reason"]
    assert "KiB free, and a launch needs 16384" in body["reason"]
    assert "cluster.run_dir" in body["hint"]
    assert not run_dir.exists()


def test_a_disk_without_a_free_inode(host: Node, small_disk: Path) -> None:
    mount("-o", "remount,nr_inodes=6", str(small_disk))
    agent = host.launch(host.shell("exit"), run_dir=str(small_disk / "runs"))
    assert refusal(host, agent)["reason"].endswith(": the disk is full (no inode free)")


def test_a_host_that_lets_a_process_open_too_few_files(host: Node) -> None:
    agent = host.agent()
    resource.prlimit(agent.expect("hello")["pid"], resource.RLIMIT_NOFILE, (64, 64))
    host.launch(*(host.shell("exit", index) for index in range(40)), agent=agent)
    body = refusal(host, agent)
    assert body["reason"] == "a process may open 64 files on this host, but this job needs 104"
    assert "ulimit -Hn" in body["hint"]


def test_a_disk_that_fills_up_during_the_run_loses_no_event(host: Node, small_disk: Path) -> None:
    fill = "head -c 20000000 /dev/zero; echo $? >> done; exit 3"
    agent = host.start(host.shell(fill), run_dir=str(small_disk / "runs"))
    assert agent.event("exited")["code"] == 3
    agent.event("ended")
    agent.wait()


def test_evidence_on_a_full_disk_leaves_room_for_the_end(small_disk: Path) -> None:
    """The stacks of all ranks are longer than the reserve."""
    folder = os.open(small_disk, os.O_RDONLY)
    events = Events(folder)
    os.close(folder)
    disk = os.statvfs(small_disk)
    (small_disk / "ballast").write_bytes(b"\0" * (disk.f_bavail * disk.f_frsize))
    for size in (1000, 100, 1):
        for _ in range(1000):
            events.append("stack", text="x" * size)
    for index in range(50):
        events.append("exited", role="worker", index=index, error={"traceback": "x" * 10_000})
    events.append("ended")
    found = list(EventReader(os.fsencode(small_disk / "events")).all())
    kinds = [event["event"] for event in found]
    assert kinds.count("stack") > 20
    assert kinds[-51:] == [*["exited"] * 50, "ended"]


def test_evidence_of_a_long_run_does_not_hide_its_end(tmp_path: Path) -> None:
    """Each stall adds the stacks of all ranks. A reader stops somewhere."""
    folder = os.open(tmp_path, os.O_RDONLY)
    events = Events(folder)
    os.close(folder)
    for _ in range(MAX_EVENTS // 400_000 + 10):
        events.append("stack", text="x" * 400_000)
    events.append("ended")
    kinds = [event["event"] for event in EventReader(os.fsencode(tmp_path / "events")).all()]
    assert kinds.count("stack") > 50
    assert kinds[-1] == "ended"


def test_a_read_only_disk(host: Node, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    body = host.launch(host.shell("exit"), run_dir=str(small_disk)).expect("refused")
    assert body["what"] == "permission"
    assert body["reason"].endswith("the file system is read-only")


def test_a_folder_that_cannot_be_created(host: Node) -> None:
    """Not even by root."""
    body = host.launch(host.shell("exit"), run_dir="/sys/dtrain").expect("refused")
    assert body["what"] == "permission"
    assert "cluster.run_dir" in body["hint"]


def test_a_launcher_of_another_version(host: Node) -> None:
    body = refusal(host, host.launch(host.shell("exit"), protocol=99))
    assert (body["what"], body["reason"]) == ("agent", "the launcher speaks protocol 99, not 1")


@pytest.mark.parametrize("name", ["..", "a/b", ""])
def test_names_that_lead_out_of_the_run_folder(host: Node, name: str) -> None:
    assert refusal(host, host.launch(host.shell("exit"), host=name))["what"] == "agent"
    with node(host.python) as other:
        agent = other.launch(other.shell("exit"), agent=other.agent("x"), run=name)
        assert refusal(other, agent)["what"] == "agent"


def test_attaching_to_a_run_that_does_not_exist(host: Node) -> None:
    body = refusal(host, host.attach("nothing"))
    assert (body["what"], body["reason"]) == (
        "gone",
        f"no run nothing on this host ({host.folder('nothing')} does not exist)",
    )


@pytest.mark.parametrize("setup", [[], ["true"]], ids=["copy", "shell"])
def test_a_host_that_starts_no_more_processes(host: Node, tasks: Path, setup: list[str]) -> None:
    """Whichever process or thread is the first that the host does not start."""
    reasons = set()
    for most in itertools.count(1):
        (tasks / "pids.max").write_text(str(most))
        agent = host.agent()
        (tasks / "cgroup.procs").write_text(str(agent.expect("hello")["pid"]))
        host.launch(host.shell("exit"), agent=agent, setup=setup)
        agent.until(lambda agent=agent: len(agent.messages) > 1)
        if agent.messages[1]["type"] == "prepared":
            break
        reasons.add(refusal(host, agent)["reason"].partition(":")[0])
    assert reasons == {"cannot start a process"}
    (tasks / "pids.max").write_text((tasks / "pids.current").read_text())
    agent.command("start")
    assert agent.event("ended")["error"].startswith("cannot start a process: ")
    agent.wait()
