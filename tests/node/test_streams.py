"""Every byte of output arrives once and in order, however slowly it is read."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

from dtrain.node.agent.follower import OutputFile
from dtrain.node.programs import program
from support.limits import HANG, until
from support.node import Node

FLOOD = """
import os, sys
me = int(sys.argv[1])
out = b"".join(b"worker %d line %d of stdout\\n" % (me, n) for n in range(25000))
err = b"".join(b"worker %d line %d of stderr\\n" % (me, n) for n in range(25000))
for start in range(0, len(out), 5000):
    os.write(1, out[start:start + 5000]); os.write(2, err[start:start + 5000])
os.write(1, b"\\xff\\xfe\\x00\\x1b[31m" + b"x" * 1000000 + b"\\r no newline")
"""


def test_four_workers_are_copied_byte_for_byte(host: Node) -> None:
    agent = host.start(
        *(host.process([host.python, "-ISc", FLOOD, str(n)], index=n) for n in range(4))
    )
    agent.wait()
    for me in range(4):
        for fd, kind in (("out", b"stdout"), ("err", b"stderr")):
            line = b"worker %d line %%d of %b\n" % (me, kind)
            wanted = b"".join(line % n for n in range(25000))
            if fd == "out":
                wanted += b"\xff\xfe\x00\x1b[31m" + b"x" * 1000000 + b"\r no newline"
            assert bytes(agent.output[f"worker-{me}.{fd}"]) == wanted
            assert (host.folder() / f"worker-{me}.{fd}").read_bytes() == wanted


def test_more_output_files_than_the_soft_limit(host: Node) -> None:
    """The workers keep the limit."""
    agent = host.agent()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.prlimit(agent.expect("hello")["pid"], resource.RLIMIT_NOFILE, (64, hard))
    host.launch(*(host.shell("ulimit -Sn", index) for index in range(40)), agent=agent)
    agent.expect("prepared")
    agent.command("start")
    agent.wait()
    assert [agent.text(f"worker-{index}.out") for index in range(40)] == ["64\n"] * 40


def test_a_slow_reader_delays_only_its_relay(host: Node) -> None:
    agent = host.start(
        host.shell(
            "head -c 8000000 /dev/zero; trap 'exit 3' TERM; echo > wrote; "
            "while :; do sleep 0.05; done"
        )
    )
    agent.event("started")
    agent.pause_reading()
    until((host.workdir / "wrote").exists)
    agent.command("stop", grace=HANG)
    host.until_nothing_runs()
    agent.resume_reading()
    assert agent.event("exited")["code"] == 3
    agent.wait()
    assert bytes(agent.output["worker-0.out"]) == b"\0" * 8000000


def test_each_truncation_of_a_file_is_reported_once(host: Node) -> None:
    wait = "until test -e {}; do sleep 0.02; done; "
    agent = host.start(
        host.shell("seq 1000; " + wait.format("go") + "seq 2000; " + wait.format("end"))
    )
    path = host.folder() / "worker-0.out"
    for last in (b"1000\n", b"2000\n"):
        agent.until(lambda last=last: last in agent.output.get("worker-0.out", b""))
        os.truncate(path, 0)
        size = len(agent.output["worker-0.out"])
        missing = f"its output is missing until it again has {size} bytes"
        agent.expect("notice", text=f"worker-0.out was truncated: {missing}")
        (host.workdir / "go").touch()
    (host.workdir / "end").touch()
    agent.wait()


def test_a_file_that_its_server_has_lost_is_not_shorter(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    os.close(fd)  # each call fails, as with ESTALE of NFS
    lost = OutputFile(1, b"worker-0.out", 10, fd)
    assert (lost.read(), lost.size()) == (b"", 10)


def test_the_next_relay_continues_after_a_killed_one(host: Node) -> None:
    write = "until test -e go; do sleep 0.02; done; for n in $(seq 5000); do echo line $n; done"
    agent = host.start(host.shell(f"seq 1000; echo first half; {write}"))
    agent.until(lambda: b"first half" in agent.output.get("worker-0.out", b""))
    agent.kill()
    (host.workdir / "go").touch()
    second = host.attach(offsets=agent.offsets)
    second.expect("attached")
    second.expect("bye")
    second.wait()
    whole = agent.output["worker-0.out"] + second.output["worker-0.out"]
    assert second.begin["worker-0.out"] == len(agent.output["worker-0.out"])
    assert bytes(whole) == (host.folder() / "worker-0.out").read_bytes()
    assert len(whole.splitlines()) == 6001
    assert [event["event"] for event in agent.events + second.events] == [
        "started",
        "exited",
        "ended",
    ]


def test_two_relays_see_the_same_and_both_can_command(host: Node) -> None:
    agent = host.start(host.shell("echo ready; exec sleep 600"))
    agent.until(lambda: agent.text("worker-0.out"))
    second = host.attach()
    second.until(lambda: second.text("worker-0.out"))
    second.command("kill")
    for one in (agent, second):
        one.expect("bye")
        one.wait()
    assert second.events == agent.events
    assert second.output == agent.output


def test_a_run_that_is_over_can_still_be_read(host: Node) -> None:
    agent = host.start(host.shell("echo hello; exit 4"))
    agent.wait()
    second = host.attach(offsets={"worker-0.out": 2})
    second.expect("attached")
    second.wait()
    assert second.events == agent.events
    assert second.text("worker-0.out") == "llo\n"
    third = host.attach(offsets=agent.offsets)
    third.wait()
    assert third.events == []
    assert third.begin == {}


def test_attaching_to_events_only(host: Node) -> None:
    agent = host.start(host.shell("echo hello; exit 4"))
    agent.wait()
    second = host.attach(outputs=False)
    second.expect("bye")
    second.wait()
    assert second.events == agent.events
    assert second.output == {}


def test_a_disconnected_reader_ends_only_the_relay(host: Node) -> None:
    agent = host.start(host.shell("echo ready; exec sleep 600"))
    agent.until(lambda: agent.text("worker-0.out"))
    agent.close_stdin()
    assert agent.wait() == 0
    until(lambda: host.processes("sleep"))
    second = host.attach()
    second.command("kill")
    second.expect("bye")


def test_a_relay_ends_if_its_launcher_is_silent(host: Node) -> None:
    """A launcher that loses power does not disconnect, and the relay may block in a write."""
    impatient = program("agent").replace(b"ALONE = 60", b"ALONE = 8")
    assert impatient != program("agent")
    flood = host.shell("echo ready; while :; do printf %099999d 1; sleep 0.05; done")
    agent = host.launch(flood, agent=host.agent(source=impatient))
    agent.expect("prepared")
    agent.command("start")
    agent.event("started")
    agent.pause_reading()
    assert agent.wait_for_end() == -signal.SIGALRM
    second = host.attach()
    second.expect("attached")
    second.command("kill")
    second.expect("bye")


def test_zeros_follow_the_last_event(host: Node) -> None:
    agent = host.start(host.shell("exit"))
    agent.wait()
    data = (host.folder() / "events").read_bytes()
    assert len(data) == 65536
    lines, _, rest = data.partition(b"\0")
    assert [json.loads(line) for line in lines.splitlines()] == agent.events, agent.messages
    assert rest.strip(b"\0") == b""
    assert agent.offsets["events"] == len(lines)
    assert os.path.getsize(host.folder() / "agent.log") == 0
