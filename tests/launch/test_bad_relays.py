"""A host on which no relay answers is reported as that host's failure, never as a bug."""

from __future__ import annotations

import json
import sys

import pytest

from dtrain.node import protocol
from dtrain.node.agent import wire
from support.launching import Done, Scene


def message(**body: object) -> bytes:
    payload = json.dumps(body).encode()
    return protocol.HEADER.pack(protocol.MESSAGE, 0, 0, len(payload)) + payload


def event(offset: int, kind: str, **body: object) -> bytes:
    return message(type="event", offset=offset, event={"event": kind, "time": 0.0, **body})


HELLO = wire.PREAMBLE + message(type="hello", time=0.0, pid=1)
PREPARED = HELLO + message(type="prepared", workdir="/", folder="/")
ATTACHED = HELLO + message(type="attached")
WHO = {"role": "worker", "index": 0, "rank": 0, "pid": 7}
STARTED = event(1, "started", **WHO)
EXITED = event(2, "exited", **WHO, code=0, signal=None, stopping=False)
RELAY = f"""#!{sys.executable}
import json, os, re, sys
stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
program = stdin.read(int(stdin.readline().rpartition(b"#")[2]))
stdin.read(int(re.search(rb"stream.read\\((\\d+)\\)", program)[1]))
op = json.loads(stdin.readline())["op"]
def say(name):
    path = os.path.join(os.path.dirname(sys.argv[0]), name)
    if os.path.exists(path):
        stdout.write(open(path, "rb").read())
        stdout.flush()
say(op)
if op == "launch" and os.path.exists(os.path.join(os.path.dirname(sys.argv[0]), "start")):
    while b'"start"' not in stdin.readline():
        pass
    say("start")
"""
"""Prints the files ``launch``, ``start`` and ``attach`` in its folder, and ends."""


def launched(scene: Scene, *, code: int = 3, **said: bytes) -> Done:
    """A launch on one host, whose relay answers each command with these bytes."""
    python = scene.script(RELAY, name="python")
    python.chmod(0o755)
    for command, answer in said.items():
        (scene.folder / command).write_bytes(answer)
    cluster = scene.cluster_file(
        scene.script("pass"),
        hosts=1,
        slots=1,
        python=str(python),
        restart={"node_timeout": "2s"},
    )
    done = scene.launch(cluster, "--no-check").wait()
    assert done.code == code, done
    assert f"{'problem' if code else 'warning'}: node0: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(scene.folder.rglob("fault.txt"))
    return done


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (b"", "ended with status 0"),
        (b"Welcome to node0!\nMaintenance on Friday.\n", "Maintenance on Friday"),
        (wire.PREAMBLE + b"\xff" * 64, "unreadable frame"),
        (HELLO + message(type="refused", what="x"), "refused.what: expected one of"),
    ],
)
def test_bad_relay(scene: Scene, said: bytes, message: str) -> None:
    assert message in launched(scene, launch=said).stderr


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (EXITED, "worker 0 has not started"),
        (STARTED + EXITED.replace(b'"pid": 7', b'"pid": 8'), "process 8 exited"),
        (STARTED + event(9, "ended", survivors=[]), "worker 0 has not exited"),
        (STARTED + message(type="bye"), "the job has not ended on this host"),
        (STARTED + message(type="event", offset=float("inf"), event={}), "event.offset"),
    ],
)
def test_forged_events_name_their_host(scene: Scene, said: bytes, message: str) -> None:
    done = launched(scene, launch=PREPARED, start=said)
    assert message in done.stderr
    assert "node0 failed" in done.stderr
    (path,) = scene.folder.rglob("journal.jsonl")
    said = [line for line in map(json.loads, path.read_text().splitlines()) if "state" in line]
    # The last state keeps the reason; "lost" would hide it.
    assert said[-1]["state"] == "failed"
    assert message in said[-1]["detail"]


def test_a_relay_that_attaches_and_breaks_is_given_up(scene: Scene) -> None:
    """It sends nothing new, so the host is lost after `restart.node_timeout`."""
    done = launched(scene, launch=PREPARED, start=STARTED, attach=ATTACHED)
    assert "cut off for 2 s" in done.stderr
    assert "a host is lost after 2 s (job.restart.node_timeout)" in done.stderr
    assert "node0 failed" in done.stderr


def test_a_host_that_is_lost_after_its_workers_finished_is_a_warning(scene: Scene) -> None:
    done = launched(scene, code=0, launch=PREPARED, start=STARTED + EXITED, attach=ATTACHED)
    assert "warning: node0: following the job: cut off for 2 s\n" in done.stderr
    assert "did not confirm that the job's processes ended; the end of their output" in done.stderr
    assert "the worker finished" in done.stderr


def test_output_that_does_not_arrive_is_a_warning(scene: Scene) -> None:
    said = STARTED + EXITED + event(3, "ended", survivors=[])
    done = launched(scene, code=0, launch=PREPARED, start=said, attach=ATTACHED)
    assert "warning: node0: receiving the end of the output: cut off for 2 s\n" in done.stderr
    assert "hint: " not in done.stderr
    assert "the worker finished" in done.stderr
