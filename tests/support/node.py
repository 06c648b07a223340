"""Drives the real node agent like a launcher: through the boot command and two pipes."""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtrain.launchplan.environment import NodeVariable, host_variables, process_variables
from dtrain.node import protocol
from dtrain.node.agent.wire import VERSION
from dtrain.node.boot import framed
from dtrain.node.programs import boot_command, program
from dtrain.spec.model import Job
from support.limits import HANG, until

PATIENCE = HANG


@functools.cache
def pythons() -> dict[tuple[int, int], str]:
    """The interpreters of this machine by version."""
    found: dict[tuple[int, int], str] = {}
    folders = [Path(name) for name in os.environ.get("PATH", "").split(":") if name]
    # Not $HOME, which tests set: the first call decides for all tests of its process.
    folders += sorted(Path(pwd.getpwuid(os.getuid()).pw_dir).glob(".pyenv/versions/*/bin"))
    for folder in folders:
        for path in folder.glob("python[23].*"):
            named = re.fullmatch(r"python(\d)\.(\d+)", path.name)
            if not named:
                continue
            version = int(named[1]), int(named[2])
            works = version in found or subprocess.run([path, "-c", ""], capture_output=True)
            if works is not True and works.returncode == 0:
                found[version] = str(path)
    return found


def oldest_python() -> str:
    """The oldest interpreter that the agent promises to run under."""
    able = {version: path for version, path in pythons().items() if version >= (3, 8)}
    return able[min(able)] if able else sys.executable


@functools.cache
def patient() -> bytes:
    """The agent, whose relay waits longer for commands: tests do not ping it as launchers do."""
    source = program("agent")
    changed = source.replace(b"ALONE = 60", b"ALONE = %d" % HANG)
    assert changed != source
    return changed


class Agent:
    """One relay: a launch, or an attachment to one."""

    def __init__(
        self,
        python: str,
        run: str,
        environment: dict[str, str] | None = None,
        source: bytes = b"",
    ) -> None:
        self._process = subprocess.Popen(
            ["sh", "-c", boot_command(python, run)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        self.pid = self._process.pid
        self.messages: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.streams: dict[int, dict[str, Any]] = {}
        self.output: dict[str, bytearray] = {}
        self.begin: dict[str, int] = {}
        self.offsets: dict[str, int] = {}
        """The offsets for an `attach` that continues here."""
        self.faults: list[str] = []
        self._arrived = threading.Condition()
        self._reading = threading.Event()
        self._reading.set()
        self._ended = False
        self.stderr = b""
        self._threads = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_stderr, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self.write(framed(source or patient()))

    def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def command(self, op: str, **body: Any) -> None:
        self.write(protocol.encode_command({"op": op, **body}))

    def pause_reading(self) -> None:
        """Let the relay's stdout fill up."""
        self._reading.clear()

    def resume_reading(self) -> None:
        self._reading.set()

    def close_stdin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill(self) -> None:
        """What a crash of the relay's host session does. All that it has sent is taken in."""
        self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join(PATIENCE)

    def wait_for_end(self) -> int:
        """The relay's exit status; discards its remaining output."""
        return self._process.wait(PATIENCE)

    def wait(self) -> int:
        """The relay's exit status, with all its output taken in."""
        status = self._process.wait(PATIENCE)
        for thread in self._threads:
            thread.join(PATIENCE)
        assert not self.faults, self.faults
        return status

    def expect(self, kind: str, **like: Any) -> dict[str, Any]:
        """The first message of a type; fails when the relay ends or takes too long."""
        return self.until(
            lambda: next((body for body in self.messages if matches(body, type=kind, **like)), None)
        )

    def event(self, kind: str, **like: Any) -> dict[str, Any]:
        return self.until(
            lambda: next((one for one in self.events if matches(one, event=kind, **like)), None)
        )

    def text(self, name: str) -> str:
        return bytes(self.output.get(name, b"")).decode()

    def until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE
        with self._arrived:
            while True:
                value = condition()
                if value:
                    return value
                left = deadline - time.monotonic()
                assert left > 0 and not self._ended, (
                    f"waited in vain\nmessages: {self.messages}\nstderr: {self.stderr!r}\n"
                    f"status: {self._process.poll()}\nfaults: {self.faults}"
                )
                self._arrived.wait(left)

    def close(self) -> None:
        self._reading.set()
        # Before its pipes are closed: a late reader would take data of the next agent, whose pipes
        # get the same descriptors.
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        decoder = protocol.FrameDecoder()
        try:
            while data := os.read(fd, 1 << 18):
                self._reading.wait()
                with self._arrived:
                    for frame in decoder.feed(data):
                        self._take(frame)
                    self._arrived.notify_all()
        except (OSError, protocol.ProtocolError) as error:
            self.faults.append(repr(error))
        with self._arrived:
            self._ended = True
            self._arrived.notify_all()

    def _take(self, frame: protocol.Message | protocol.Data) -> None:
        if isinstance(frame, protocol.Data):
            name = self.streams[frame.stream]["name"]
            end = self.offsets.setdefault(name, frame.offset)
            self.begin.setdefault(name, frame.offset)
            if end != frame.offset:
                self.faults.append(f"{name}: {frame.offset} does not follow {end}")
            self.output[name] += frame.payload
            self.offsets[name] = frame.offset + len(frame.payload)
            return
        body = frame.body
        self.messages.append(body)
        if body["type"] == "stream":
            self.streams[body["id"]] = body
            self.output[body["name"]] = bytearray()
        elif body["type"] == "event":
            self.events.append(body["event"])
            self.offsets["events"] = body["offset"]
        elif body["type"] == "progress":
            self.offsets[body["name"]] = body["offset"]

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        self.stderr = self._process.stderr.read()


def written(variables: Mapping[str, NodeVariable]) -> dict[str, Any]:
    """As a request has them."""
    return {name: asdict(variable) for name, variable in variables.items()}


def matches(body: dict[str, Any], **like: Any) -> bool:
    return all(body.get(name) == value for name, value in like.items())


class Node:
    """A separate run folder, and every process that a test's runs start in it.

    Processes are recognized by a variable that the test puts into the environment of relays and
    workers, or by a word in their arguments.
    """

    def __init__(self, folder: Path, python: str) -> None:
        self.run_dir = folder / "run dir"
        self.workdir = folder / "work dir"
        self.workdir.mkdir()
        self.python = python
        self.mark = f"dtrain-test-{uuid.uuid4().hex}"
        self._agents: list[Agent] = []

    def agent(
        self,
        run: str = "run",
        environment: dict[str, str] | None = None,
        source: bytes = b"",
    ) -> Agent:
        """``source``, where it is not the agent as it is."""
        own = {**os.environ, "DTRAIN_TEST_MARK": self.mark, **(environment or {})}
        agent = Agent(self.python, run, own, source)
        self._agents.append(agent)
        return agent

    def request(self, *processes: dict[str, Any], **body: Any) -> dict[str, Any]:
        """A launch; what is not given is plain."""
        return {
            "op": "launch",
            "protocol": VERSION,
            "run": "run",
            "host": "node0",
            "run_dir": str(self.run_dir),
            "trust_group": None,
            "containers": None,
            "interval": 0.0,
            "workdir": str(self.workdir),
            "script": None,
            "code": None,
            "python": None,
            "setup": [],
            "environment": {},
            "node_variables": written(host_variables(Job("torch"), {}, None)),
            "secrets": {},
            "world_size": sum(process["ranks"] for process in processes),
            "processes": list(processes),
            "ports": [],
            "job_ports": [],
            "grace": 10.0,
            "on_disconnect": "stop",
            "lease": 300.0,
            **body,
        }

    def launch(self, *processes: dict[str, Any], agent: Agent | None = None, **body: Any) -> Agent:
        request = self.request(*processes, **body)
        agent = agent or self.agent(request["run"])
        agent.write(protocol.encode_command(request))
        return agent

    def start(self, *processes: dict[str, Any], **body: Any) -> Agent:
        agent = self.launch(*processes, **body)
        agent.expect("prepared")
        agent.command("start")
        return agent

    def attach(
        self,
        run: str = "run",
        offsets: dict[str, int] | None = None,
        *,
        outputs: bool = True,
        previous: int | None = None,
    ) -> Agent:
        agent = self.agent(run)
        agent.command(
            "attach",
            protocol=VERSION,
            run=run,
            host="node0",
            run_dir=str(self.run_dir),
            trust_group=None,
            containers=None,
            interval=0.0,
            offsets=offsets or {},
            outputs=outputs,
            previous=previous,
        )
        return agent

    def shell(self, script: str, index: int = 0, **body: Any) -> dict[str, Any]:
        """A worker that runs a shell script."""
        return self.process(["bash", "-c", script], index, **body)

    def code(self, source: str, index: int = 0, **body: Any) -> dict[str, Any]:
        """A worker that runs Python, without a site: it starts in a moment."""
        return self.process([self.python, "-ISc", source], index, **body)

    def process(self, argv: list[str], index: int = 0, **body: Any) -> dict[str, Any]:
        base = {
            "role": "worker",
            "index": index,
            "rank": index,
            "ranks": 1,
            "bound_to_gpus": [],
            "container": [],
        }
        whole = {**base, "argv": argv, "environment": {}, **body}
        own = process_variables(whole["role"], whole["index"], scripted=False)
        return {"node_variables": written(own), **whole}

    def folder(self, run: str = "run", host: str = "node0") -> Path:
        return self.run_dir / "nodes" / run / host

    def processes(self, word: str = "") -> dict[int, str]:
        """Living processes with the mark, filtered by ``word`` on their command
        line."""
        relays = {agent.pid for agent in self._agents}
        found = {}
        for path in Path("/proc").iterdir():
            if not path.name.isdigit() or int(path.name) in relays:
                continue
            try:
                arguments = (path / "cmdline").read_bytes()
                environment = (path / "environ").read_bytes()
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            marked = self.mark.encode() in environment + arguments
            if marked and word.encode() in arguments and state not in "ZX":
                found[int(path.name)] = arguments.replace(b"\0", b" ").decode(errors="replace")
        return found

    def until_nothing_runs(self) -> None:
        until(lambda: not self.processes(), "the end of all processes")

    def close(self) -> None:
        for agent in self._agents:
            agent.close()
        deadline = time.monotonic() + HANG
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def node(python: str | None = None) -> Iterator[Node]:
    folder = Path(tempfile.mkdtemp(prefix="dtrain-node-"))
    one = Node(folder, python or oldest_python())
    try:
        yield one
    finally:
        one.close()
        shutil.rmtree(folder, ignore_errors=True)
