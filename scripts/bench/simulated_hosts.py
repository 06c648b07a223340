#!/usr/bin/env python3
"""Simulated hosts for `scripts/bench/many_hosts.py`: hundreds in one process.

Each has an address of its own. It speaks real SSH (asyncssh) and dtrain's real node protocol: it
reads the program that the launcher sends, and then answers as the facts program or as the agent
does. It runs no program: its ranks are counters that write lines. So a host costs its machine
little, and the launcher does what it does for real hosts.

    simulated_hosts.py SETTINGS     (a JSON file, see `Settings`)

It writes one JSON line to stdout for each thing that happens: ``listening``, and ``started``,
``stopped`` and ``ended`` for each host, with the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh

from dtrain.node.agent.wire import DATA, HEADER, MESSAGE, VERSION
from dtrain.node.agent.wire import PREAMBLE as AGENT_PREAMBLE
from dtrain.node.facts.wire import PREAMBLE as FACTS_PREAMBLE
from dtrain.node.facts.wire import RELEASE

LINE = b"step %06d  loss 2.345678  12345.6 tokens/s  written %.3f\n"
KEPT = 1 << 18
"""Bytes of each stream that a host keeps for a launcher that connects again."""


@dataclass(frozen=True)
class Settings:
    """What the hosts of one process do."""

    hosts: dict[str, dict[str, float]]
    """By address: the faults of each host. ``slow``: seconds until it answers anything.
    ``drops``: seconds after its start at which its connection breaks, once. ``fails``: seconds
    after its start at which its first rank exits with status 1."""
    port: int
    host_key: str
    client_key: str
    """Files: the key that all hosts share, and the public key that may log in."""
    seconds: float
    """How long the ranks run."""
    rate: float
    """Lines that each rank writes in a second."""


def report(what: str, **more: object) -> None:
    sys.stdout.write(json.dumps({"what": what, "time": time.time(), **more}) + "\n")
    sys.stdout.flush()


@dataclass
class Stream:
    """The stdout of a rank."""

    number: int
    size: int = 0
    steps: int = 0
    kept: bytes = b""

    def write(self, lines: int, now: float) -> None:
        new = b"".join(LINE % (self.steps + each, now) for each in range(lines))
        self.steps += lines
        self.size += len(new)
        self.kept = (self.kept + new)[-KEPT:]

    def read(self, offset: int) -> bytes:
        return self.kept[len(self.kept) - (self.size - offset) :] if offset < self.size else b""


@dataclass
class Run:
    """The job on one host. It goes on without a connection."""

    name: str
    processes: list[dict[str, Any]]
    streams: list[Stream]
    began: float = 0.0
    dropped: bool = False
    events: list[dict[str, Any]] = field(default_factory=list)
    stopping: bool = False
    failed: bool = False
    """Whether a rank has failed: the others wait for it."""
    ended: bool = False

    @property
    def is_started(self) -> bool:
        return self.began > 0

    def happened(self, kind: str, **more: object) -> None:
        self.events.append({"event": kind, "time": time.time(), **more})

    def exit(self, code: int | None, number: int) -> None:
        process = self.processes[number]
        self.happened(
            "exited",
            role=process["role"],
            index=process["index"],
            rank=process["rank"],
            pid=1000 + number,
            code=code,
            signal=None if code is not None else "SIGTERM",
            stopping=self.stopping,
        )


class SimulatedHost:
    """One host. Its run outlives a connection."""

    def __init__(self, address: str, settings: Settings) -> None:
        self.address = address
        self.settings = settings
        self.faults = settings.hosts[address]
        self.runs: dict[str, Run] = {}

    async def serve(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        with contextlib.suppress(asyncssh.Error, OSError, EOFError, asyncio.IncompleteReadError):
            await asyncio.sleep(self.faults.get("slow", 0.0))
            size = (await process.stdin.readline()).rpartition(b"#")[2]
            program = await process.stdin.readexactly(int(size))
            main = re.search(rb"start\(stream,'([\w.]+)'", program)
            assert main, program
            # The payload with the compiled modules follows, see `dtrain.node.boot.bundle`, unless
            # it is a program that hosts keep: they have kept it.
            if payload := re.search(rb"stream\.read\((\d+)\)", program):
                await process.stdin.readexactly(int(payload[1]))
            if main[1] == b"dtrain.node.checked_launch" and not await self._facts(process):
                return
            await Agent(self, process).serve()
        with contextlib.suppress(asyncssh.Error, OSError):
            process.exit(0)

    async def _facts(self, process: asyncssh.SSHServerProcess[bytes]) -> bool:
        """Answer the check. Whether the launch follows."""
        process.stdout.write(FACTS_PREAMBLE)
        while line := await process.stdin.readline():
            if line == RELEASE:
                return True
            order = json.loads(line)
            process.stdout.write(json.dumps(self._answer(order)).encode() + b"\n")
        return False

    def _answer(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["op"] == "clock":
            return {"time": time.time()}
        if order["op"] == "gather":
            return {"facts": self._observed(order), "listening": {"port": 40000}}
        # Every other host answers.
        return {
            "dialed": [
                {"host": host, "kind": kind, "address": address, "port": port, "seconds": 1e-4}
                for host, kind, address, port, _ in order["targets"]
            ]
        }

    def _observed(self, order: dict[str, Any]) -> dict[str, Any]:
        """What the probes of a quick check find on a healthy host."""
        workdir = order["workdir"]
        room = {"total": 1 << 40, "free": 1 << 39, "inodes": 1 << 30, "inodes_free": 1 << 29}
        place = {
            "exists": True,
            "mount": "/",
            "type": "ext4",
            "source": "/dev/sda",
            "not_writable": "",
        }
        folders = {**order["folders"], **order["own_folders"]}
        known = {
            "machine": {
                "hostname": order["host"],
                "boot": f"boot of {self.address}",
                "network": 1,
                "python": "3.11.7",
                "cpus": 8,
            },
            "script": {
                "workdir": workdir,
                "workdir_exists": True,
                "path": order.get("script") or "",
                "exists": True,
            },
            "names": {
                # As real hosts resolve them: not to addresses of the loopback interface.
                "hosts": {
                    host: {"addresses": [address.replace("127.", "10.", 1)]}
                    for host, address in order["addresses"].items()
                },
                "own": {"addresses": [self.address.replace("127.", "10.", 1)]},
            },
            "network": {
                "interfaces": {
                    "eth0": {
                        "addresses": [self.address.replace("127.", "10.", 1)],
                        "up": True,
                        "state": "up",
                        "mtu": 9000,
                        "speed": 100000,
                    }
                },
                "routes": {},
            },
            "storage": {
                key: {"path": path, "nearest": path, **room, **place}
                for key, path in folders.items()
            },
            "interpreter": {"status": 0, "python": "3.11.7", "executable": "/usr/bin/python3"},
        }
        ports = {str(port): {"free": True} for port in order["ports"]}
        return {"ports": ports, **{key: known[key] for key in order["probes"] if key in known}}


class Agent:
    """The relay and the supervisor of one host on one connection."""

    def __init__(self, host: SimulatedHost, process: asyncssh.SSHServerProcess[bytes]) -> None:
        self.host = host
        self.process = process
        self.run: Run | None = None
        self.interval = 0.0
        self.sent_events = 0
        self.sent: dict[int, int] = {}
        """Bytes sent of each stream."""
        self.wake = asyncio.Event()

    async def serve(self) -> None:
        self.process.stdout.write(AGENT_PREAMBLE)
        self._send(
            "hello",
            protocol=VERSION,
            python="3.11.7",
            hostname=self.host.address,
            time=time.time(),
            pid=os.getpid(),
        )
        request = json.loads(await self.process.stdin.readline())
        self.interval = request.get("interval", 0.0)
        runs = self.host.runs
        if request["op"] == "attach":
            if request["run"] not in runs:
                self._send("refused", what="gone", reason="no run here", hint="")
                return
            self.run = runs[request["run"]]
            offsets = request["offsets"]
            for number, process in enumerate(self.run.processes):
                self.sent[number] = offsets.get(f"{process['role']}-{process['index']}.out", 0)
            self._send("attached", folder="/run", running=not self.run.ended)
        else:
            processes = request["processes"]
            streams = [Stream(number + 1) for number in range(len(processes))]
            self.run = runs[request["run"]] = Run(request["run"], processes, streams)
            self._send("prepared", workdir="/work", folder="/run")
        listener = asyncio.ensure_future(self._listen())
        try:
            await self._follow(self.run)
        finally:
            listener.cancel()
        self._send("bye")

    def _send(self, kind: str, **body: object) -> None:
        data = json.dumps({"type": kind, **body}).encode()
        self.process.stdout.write(HEADER.pack(MESSAGE, 0, 0, len(data)) + data)

    async def _listen(self) -> None:
        """Commands of the launcher."""
        run = self.run
        assert run is not None
        with contextlib.suppress(asyncssh.Error, OSError):
            while line := await self.process.stdin.readline():
                command = json.loads(line)
                if command["op"] == "ping":
                    self._send("alive", supervisor=os.getpid(), silent=0.0, time=time.time())
                elif command["op"] == "start":
                    self._start(run)
                elif command["op"] in ("stop", "kill", "abort"):
                    self._stop(run, command.get("reason", ""))
        if not run.is_started:
            run.ended = True
        self.wake.set()

    def _start(self, run: Run) -> None:
        if run.is_started or run.ended:  # a launcher repeats it after a broken connection
            return
        run.began = time.time()
        for number, process in enumerate(run.processes):
            what = {key: process[key] for key in ("role", "index", "rank")}
            run.happened("started", **what, pid=1000 + number)
        report("started", host=self.host.address)
        self.wake.set()

    def _stop(self, run: Run, reason: str) -> None:
        if run.ended or run.stopping:
            return
        report("stopped", host=self.host.address)
        run.stopping = True
        if run.is_started:
            run.happened("stopping", reason=reason)
            gone = {event["pid"] for event in run.events if event["event"] == "exited"}
            for number in range(len(run.processes)):
                if 1000 + number not in gone:
                    run.exit(None, number)
            run.happened("ended", survivors=[])
        run.ended = True
        self.wake.set()

    async def _follow(self, run: Run) -> None:
        """Send what is new, as often as a relay reads the files of its ranks."""
        settings, faults = self.host.settings, self.host.faults
        while True:
            now = time.time()
            if run.is_started and not run.ended:
                age = now - run.began
                due = int(min(age, settings.seconds) * settings.rate)
                for stream in run.streams:
                    stream.write(due - stream.steps, now)
                if age >= faults.get("fails", float("inf")) and not run.stopping:
                    faults.pop("fails")
                    run.exit(1, 0)
                    run.failed = True
                if age >= faults.get("drops", float("inf")):
                    faults.pop("drops")
                    self.process.channel.get_connection().abort()
                    return
                if age >= settings.seconds and not run.stopping and not run.failed:
                    for number in range(len(run.processes)):
                        run.exit(0, number)
                    run.happened("ended", survivors=[])
                    run.ended = True
            self._send_new(run)
            if run.ended:
                report("ended", host=self.host.address)
                return
            await self.process.stdout.drain()
            # Like a relay whose ranks write one after the other, unless the launcher asks for less.
            each = max(self.interval, 1 / (settings.rate or 1) / max(1, len(run.streams)))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.wake.wait(), each if run.is_started else None)
            self.wake.clear()

    def _send_new(self, run: Run) -> None:
        for number in range(self.sent_events, len(run.events)):
            event = run.events[number]
            self._send("event", offset=number + 1, event=event)
            if event["event"] == "started":
                which = event["pid"] - 1000
                more = {key: event[key] for key in ("role", "index", "rank")}
                name = f"{event['role']}-{event['index']}.out"
                self._send("stream", id=which + 1, name=name, fd="stdout", **more)
                self.sent.setdefault(which, 0)
        self.sent_events = len(run.events)
        parts = []
        for number, offset in self.sent.items():
            data = run.streams[number].read(offset)
            if data:
                parts.append(HEADER.pack(DATA, number + 1, offset, len(data)) + data)
                self.sent[number] = offset + len(data)
        if parts:
            self.process.stdout.write(b"".join(parts))


class Login(asyncssh.SSHServer):
    def begin_auth(self, username: str) -> bool:
        return True


async def serve(settings: Settings) -> None:
    hosts = {address: SimulatedHost(address, settings) for address in settings.hosts}
    kept: set[asyncio.Task[None]] = set()

    def done(task: asyncio.Task[None]) -> None:
        kept.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            traceback.print_exception(error)

    def handle(process: asyncssh.SSHServerProcess[bytes]) -> None:
        here = process.get_extra_info("sockname")[0]
        task = asyncio.ensure_future(hosts[here].serve(process))
        kept.add(task)
        task.add_done_callback(done)

    await asyncssh.listen(
        host=list(hosts),
        port=settings.port,
        server_factory=Login,
        server_host_keys=[settings.host_key],
        authorized_client_keys=settings.client_key,
        process_factory=handle,
        encoding=None,
        compression_algs=None,
        gss_host=None,
        backlog=128,
        login_timeout=0,
    )
    report("listening")
    await asyncio.Event().wait()


def main() -> None:
    settings = Settings(**json.loads(Path(sys.argv[1]).read_text()))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(settings))


if __name__ == "__main__":
    main()
