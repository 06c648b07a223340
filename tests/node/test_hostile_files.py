"""The relay continues and the job can be stopped, whatever a worker writes to the run's folder."""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain.node.agent.control import record_in
from dtrain.node.agent.events import EventReader
from dtrain.node.agent.evidence import error_report, tail_of
from dtrain.node.agent.progress import MAX_REPORT, ProgressFiles, report_in
from dtrain.node.agent.wire import RefusedError
from dtrain.node.agent.worker_files import MAX_DEPTH, decode, open_regular
from dtrain.node.programs import program
from support.limits import until
from support.node import Node
from support.traced import traced

GOOD: dict[str, Any] = {
    "event": "progress", "time": 1.5, "step": 1, "total": 9, "loss": 0.5, "tokens": None,
    "metrics": {"lr": 0.1},
}  # fmt: skip
LINE = json.dumps(GOOD)
THINGS = {
    "FIFO": "os.mkfifo(path)",
    "socket": "import socket; socket.socket(socket.AF_UNIX).bind(path)",
    "link to a device": "os.symlink('/dev/zero', path)",
    "link to a FIFO": "os.mkfifo(path + 'x'); os.symlink(path + 'x', path)",
    "link to itself": "os.symlink(path, path)",
    "folder": "os.mkdir(path)",
    "endless line": "open(path, 'w').write('x' * 3_000_000)",
    "sparse file": "open(path, 'w').truncate(1 << 40)",
    "nested deep": f"open(path, 'w').write('[' * 100_000 + {chr(10)!r})",
    "nested": f"open(path, 'w').write('[' * 900 + ']' * 900 + {chr(10)!r})",
    "no UTF-8": "open(path, 'wb').write(b'\\xff\\xfe\\n')",
}


@pytest.mark.parametrize("thing", THINGS)
def test_no_file_in_the_folder_stops_the_relay(host: Node, thing: str) -> None:
    source = f"""
import os, time
os.chdir(os.environ["DTRAIN_RUN_DIR"])
for path in ("rank-1.progress", "worker-7.out", "worker-7.err", "worker-0.error.json"):
    {THINGS[thing]}
with open("rank-0.progress", "w") as file:
    file.write({LINE!r} + "\\n")
print("ready", flush=True)
time.sleep(600)
"""
    agent = host.start(host.code(source))
    agent.until(lambda: agent.text("worker-0.out") == "ready\n")
    said = agent.expect("progress")
    assert (said["name"], said["said"]) == ("rank-0.progress", GOOD)
    if "line" in thing or "nested" in thing or "UTF" in thing:
        assert agent.expect("notice")["text"].startswith("rank-1.progress: dropped ")
    second = host.attach(offsets=agent.offsets)
    second.expect("attached")
    second.command("stop", grace=0.0)
    second.event("exited", index=0)
    second.expect("bye")
    agent.expect("bye")
    host.until_nothing_runs()


def test_a_worker_may_replace_every_file(host: Node) -> None:
    source = """
import os
os.chdir(os.environ["DTRAIN_RUN_DIR"])
for name in os.listdir("."):
    os.unlink(name)
    os.mkfifo(name)
print("ready", flush=True)
"""
    agent = host.start(host.code(source))
    agent.event("exited", code=0)
    agent.event("ended", survivors=[])
    agent.expect("bye")
    second = host.attach()
    reason = second.expect("refused")["reason"]
    assert reason.endswith("/supervisor is not a regular file")
    host.until_nothing_runs()


CHANGES = {
    "nothing": "os.unlink(path)",
    "a FIFO": "os.unlink(path); os.mkfifo(path)",
    "a folder": "os.unlink(path); os.mkdir(path)",
    "a link": "os.unlink(path); os.symlink('/dev/zero', path)",
    "another file": "os.unlink(path); open(path, 'w').write('{}\\n' * 9)",
    "another folder": "os.rename(folder, folder + '.old'); os.mkdir(folder); os.chdir(folder)",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_job_continues_without_the_supervisors_files(host: Node, change: str) -> None:
    source = f"""
import os
folder = os.getcwd()
os.chdir(os.environ["DTRAIN_RUN_DIR"])
folder = os.getcwd()
for path in ("events", "supervisor"):
    if os.path.lexists(path):
        {CHANGES[change]}
print("ready", flush=True)
os.read(os.open({str(host.workdir / "go")!r}, os.O_RDONLY), 1)
"""
    os.mkfifo(host.workdir / "go")
    agent = host.start(host.code(source))
    agent.event("started")
    agent.until(lambda: agent.text("worker-0.out") == "ready\n")
    second = host.attach(offsets=agent.offsets)
    second.expect("attached")
    (host.workdir / "go").write_text("x")
    for relay in (agent, second):
        relay.event("exited", code=0)
        relay.event("ended", survivors=[])
        relay.expect("bye")
    host.until_nothing_runs()


def test_a_removed_run_folder_does_not_hide_the_job(host: Node) -> None:
    # Not `rm -r`: it leaves a folder in which a file appears meanwhile, such as the telemetry.
    script = 'mv "$DTRAIN_RUN_DIR" removed; echo ready; exec sleep 600'
    agent = host.start(host.shell(script))
    agent.until(lambda: agent.text("worker-0.out") == "ready\n")
    second = host.attach()
    second.expect("attached")
    second.command("stop", grace=0.0)
    second.event("ended", survivors=[])
    agent.expect("bye")
    assert host.attach().expect("refused")["what"] == "gone"
    host.until_nothing_runs()


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ("mv events x", "is missing"),
        ("mv events x; mkdir events", "is not the supervisor's file"),
        (": > events", "is too short"),
    ],
)
def test_a_removed_events_file_explains_a_lost_end(host: Node, change: str, wrong: str) -> None:
    os.mkfifo(host.workdir / "go")
    agent = host.start(host.shell("echo ready; exec cat go"))
    agent.until(lambda: agent.text("worker-0.out") == "ready\n")
    agent.event("started")  # it may come later
    subprocess.run(["sh", "-c", change], cwd=host.folder(), check=True)
    second = host.attach()
    second.expect("attached")
    (host.workdir / "go").write_text("x")
    lost = second.expect("lost", survivors=[])
    assert lost["reason"] == (
        f"the supervisor has ended, but {host.folder()}/events {wrong}; a process of the job has"
        " changed that file"
    )
    assert "$DTRAIN_RUN_DIR" in lost["hint"]


def test_an_overwritten_events_file_explains_a_lost_end(host: Node) -> None:
    os.mkfifo(host.workdir / "go")
    agent = host.start(host.shell("echo ready; exec cat go"))
    agent.until(lambda: agent.text("worker-0.out") == "ready\n")
    agent.event("started")  # it may come later
    events = host.folder() / "events"
    with events.open("r+b") as file:
        file.seek(agent.offsets["events"])
        file.write(b"x" * 4096 + b'\n{"event": "forged", "time": 1}\n')
    agent.event("forged")
    (host.workdir / "go").write_text("x")
    assert " has no record of the end; " in agent.expect("lost", survivors=[])["reason"]


def test_a_stop_continues_a_stopped_supervisor(host: Node) -> None:
    agent = host.launch(host.shell("while :; do kill -STOP $PPID; done"))
    agent.expect("prepared")
    # A worker that it starts has this name, too, for a moment.
    (supervisor,) = host.processes("dtrain-supervisor")
    agent.command("start")
    # The state follows the name, which is in parentheses.
    stat = Path(f"/proc/{supervisor}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    agent.command("stop", grace=0.0)
    assert "continued it" in agent.expect("notice")["text"]
    agent.event("ended", survivors=[])
    agent.expect("bye")
    host.until_nothing_runs()


def test_a_supervisor_that_cannot_be_continued_is_killed(host: Node) -> None:
    source = program("agent")
    assert b"SILENCE = 15.0" in source
    agent = host.agent(source=source.replace(b"SILENCE = 15.0", b"SILENCE = 0.5"))
    host.launch(host.shell("sleep 600"), agent=agent)
    agent.expect("prepared")
    # A worker that it starts has this name, too, for a moment.
    (supervisor,) = host.processes("dtrain-supervisor")
    agent.command("start")
    agent.event("started")
    with traced(supervisor):
        agent.command("ping")
        agent.command("stop", grace=0.0)
        agent.until(lambda: any("killed it" in str(one.get("text")) for one in agent.messages))
        assert agent.expect("lost")["survivors"] == []
        agent.expect("bye")
    host.until_nothing_runs()


def test_an_ended_worker_held_by_a_debugger_does_not_keep_the_run(host: Node) -> None:
    source = program("agent").replace(b"PATIENCE = 10.0", b"PATIENCE = 0.5")
    agent = host.agent(source=source)
    host.launch(host.shell("exec sleep 600"), agent=agent)
    agent.expect("prepared")
    agent.command("start")
    worker = agent.event("started")["pid"]
    with traced(worker, hold=True):
        agent.command("kill")
        survivors = agent.event("ended")["survivors"]
        assert [one["pid"] for one in survivors] == [worker]
        agent.expect("bye")
    host.until_nothing_runs()


def test_a_damaged_record_does_not_hide_the_supervisor(host: Node) -> None:
    script = "echo '{}' > \"$DTRAIN_RUN_DIR/supervisor\"; echo ready; sleep 600"
    agent = host.start(host.shell(script))
    agent.until(lambda: agent.text("worker-0.out") == "ready\n")
    second = host.attach()
    second.expect("attached")
    second.command("kill")
    second.event("ended", survivors=[])
    for relay in (agent, second):
        relay.expect("bye")
    assert "supervisor is damaged" in host.attach().expect("refused")["reason"]
    host.until_nothing_runs()


def test_impossible_ranks_are_ignored(host: Node) -> None:
    """A fake torchrun of ranks 2 and 3; its folders, environments and summary name others."""
    script = """
place=$PET_LOG_DIR/x/attempt_0
mkdir -p "$place/0" "$place/1" "$place/2" "$place/999999" "$PET_LOG_DIR/y/attempt_0/0"
for entry in 0:2 1:-1 1:99 2:4; do
    RANK=${entry#*:} LOCAL_RANK=${entry%:*} \\
        TORCHELASTIC_ERROR_FILE=$place/${entry%:*}/error.json sleep 600 &
done
printf 'rank : 77 (local_rank: 0)\\n exitcode : 1 (pid: 1)\\n' >&2
cat go; exit 1
"""
    os.mkfifo(host.workdir / "go")
    process = host.shell(script, role="torchrun", rank=None, ranks=2)
    agent = host.start(process, world_size=4)
    agent.event("rank", rank=2)
    agent.event("rank", rank=3)  # it follows from rank 2
    agent.command("stacks", abort=False)
    agent.event("stacks_done")
    (host.workdir / "go").write_text("x")
    exited = agent.event("exited")
    agent.expect("bye")
    said = [event["rank"] for event in agent.events if event["event"] in ("rank", "stack")]
    assert {*said, *(one["rank"] for one in exited["ranks"])} == {2, 3}
    host.until_nothing_runs()


@pytest.mark.parametrize("time", [-1, 1 << 40])
def test_the_time_of_an_error_file_has_limits(time: int) -> None:
    # tmpfs stores all times; ext4 does not.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "error.json")
        path.write_text('{"message": "m"}')
        os.utime(path, (time, time))
        assert path.stat().st_mtime == time
        assert error_report(os.fsencode(path)) == {"message": "m", "traceback": "", "time": None}


def test_forged_events_are_ignored(tmp_path: Path) -> None:
    forged = [
        b"[]",
        b"{}",
        b'{"event": "started", "time": 1.0}',
        b'{"event": "started", "time": 1.0, "role": "../x", "index": 0, "rank": 0, "pid": 1}',
        b'{"event": "started", "time": 1.0, "role": "worker", "index": -1, "rank": 0, "pid": 1}',
        b'{"event": "started", "time": 1.0, "role": "worker", "index": true, "rank": 0, "pid": 1}',
        b'{"event": "rank", "time": 1.0, "role": "worker", "rank": 0, "logs": 7}',
        b'{"event": ["ended"], "time": 1.0}',
        b'{"event": "ended", "time": "now"}',
        b'{"event": "ended", "time": ' + b"1" * 400 + b"}",
        b'{"event": "ended", "time": 1.0, "x": ' + b"[" * 976 + b"]" * 976 + b"}",
        b'{"event": "ended", "time": 1.0, "x": "' + b"x" * (600 << 10) + b'"}',
        b"\r\r",
    ]
    end = b'{"event": "ended", "time": 2.0, "survivors": []}\n'
    path = tmp_path / "events"
    path.write_bytes(b"\n".join([*forged, end]) + b"\0" * 99)
    assert list(EventReader(os.fsencode(path)).all()) == [json.loads(end)]


def test_the_launcher_checks_the_fields_of_a_report() -> None:
    said = {**GOOD, "step": "x", "more": [[["x"]]]}
    assert report_in(json.dumps(said).encode()) == said
    assert report_in(json.dumps({**GOOD, "event": "other"}).encode()) is None
    assert report_in(json.dumps({**GOOD, "event": ["steps"]}).encode()) is None


def test_a_line_that_is_too_long_does_not_hide_the_next(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.progress"
    path.write_text("x" * MAX_REPORT * 200)
    files = ProgressFiles(os.fsencode(tmp_path), {}, False)
    for _ in range(9):
        assert list(files.read()) == []
    with path.open("a") as file:
        file.write(f"\n{LINE}\n")
    assert [said for _, _, said in files.read()] == [GOOD]
    (notice,) = files.notices
    assert notice.startswith("rank-0.progress: dropped 1 line ")


def test_the_last_report_of_a_run_arrives_after_any_amount_of_other_data(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.progress"
    path.write_bytes(b"x\n" * (2 << 20))
    os.truncate(path, 1 << 40)
    with path.open("ab") as file:
        file.write(f"\n{LINE}\n".encode())
    files = ProgressFiles(os.fsencode(tmp_path), {}, False)
    assert list(files.read()) == []
    assert files.advanced
    assert [said for _, _, said in files.read(over=True)] == [GOOD]
    assert list(files.read(over=True)) == []
    assert not files.advanced


def test_depth_has_a_limit() -> None:
    def nested(levels: int) -> bytes:
        return b'{"a":' * levels + b"1" + b"}" * levels

    assert decode(nested(MAX_DEPTH)) is not None
    assert decode(nested(MAX_DEPTH + 1)) is None
    assert decode(nested(100_000)) is None


def test_another_users_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    os.close(open_regular(os.fsencode(path)))
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        with pytest.raises(PermissionError):
            open_regular(os.fsencode(path))


def test_random_contents_break_no_reader(tmp_path: Path) -> None:
    """Mutations of the contents of these files, with a fixed seed."""
    chance = random.Random(10)
    record = {"pid": 1, "start": 2, "machine": "m", "folder": "/f", "socket": "\0s"}
    started = {"event": "started", "time": 1.0, "role": "worker", "index": 0, "rank": 0, "pid": 1}
    failed = {"message": {"message": "m", "extraInfo": {"py_callstack": "c", "timestamp": "1"}}}
    pieces = [
        b"null", b"[]", b"{}", b"[" * 2000, b'{"a":' * 2000, b"9" * 5000, b"1e999", b"NaN",
        b"-Infinity", b'"\\ud800"', b"\0", b"\r", b"\n", b'""', b"true", b"\xff", b"-1",
    ]  # fmt: skip
    path = os.fsencode(tmp_path / "supervisor")

    def mutated(body: dict[str, Any]) -> bytes:
        text = json.dumps(body).encode() + b"\n"
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(text))
            cut = chance.choice([0, 1, 1, 5, 20])
            text = text[:at] + chance.choice(pieces) + text[at + cut :]
        return text

    def record_of(folder: bytes) -> object:
        try:
            return record_in(Path(os.fsdecode(folder), "supervisor").read_bytes(), folder)
        except RefusedError as refusal:
            return refusal

    readers: list[tuple[dict[str, Any], Callable[[], object]]] = [
        (record, lambda: record_of(os.fsencode(tmp_path))),
        (started, lambda: list(EventReader(path).all())),
        (failed, lambda: error_report(path)),
        (failed, lambda: tail_of(path, 5)),
    ]
    for body, read in readers:
        for _ in range(200):
            Path(os.fsdecode(path)).write_bytes(mutated(body))
            json.dumps(read(), default=str)
    for _ in range(1000):
        said = report_in(mutated(GOOD))
        assert said is None or said["event"] in ("progress", "steps", "tensorboard")
