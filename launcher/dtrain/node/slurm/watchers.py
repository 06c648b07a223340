"""Runs a watcher on each machine of a job, in a step beside the job's own."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
import time

from dtrain.node.agent.wire import encode, shown
from dtrain.node.agent.worker_files import decode
from dtrain.node.boot import framed, pack
from dtrain.node.slurm.commands import own_variables
from dtrain.node.slurm.wire import StepInput

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from dtrain.node.agent.launcher_channel import LauncherChannel
    from dtrain.node.agent.wire import Json
    from dtrain.node.importer import Importer
    from dtrain.node.slurm.orders import WatchOrder

PROGRAM = "dtrain.node.slurm.watcher"
FIRST_START, AGAIN = 2.0, 60.0
"""Seconds after the job's start, as many jobs end at once, and between two starts."""
END_LIMIT = 5.0
"""Seconds that the end of a program waits for the step, or the report of its end."""
MAX_LINE = 4096


class Watchers:
    def __init__(self, order: WatchOrder, importer: Importer, channel: LauncherChannel) -> None:
        """``order`` is ``watch`` in the order of the launcher."""
        self._order = order
        self._importer = importer
        self._channel = channel
        self._process: subprocess.Popen[bytes] | None = None
        self._input: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._start_at = 0.0
        self._failure = ""
        self._report_at = 0.0
        self.on_end: Callable[[], None] = lambda: None
        """Called when a step of watchers ends."""

    def poll(self, job: str) -> None:
        """Start the watchers if none run. The job is running."""
        now = time.monotonic()
        # At the end of a job, they end before its state is known.
        if self._failure and now >= self._report_at:
            self._channel.report("unwatched", text=self._failure)
            self._failure = ""
        self._start_at = self._start_at or now + FIRST_START
        if now < self._start_at or (self._process and self._process.poll() is None):
            return
        self._start_at = now + AGAIN
        nodes = self._order["nodes"]
        command = ["srun", "--jobid=" + job, "--job-name=watch", "--quiet", "--overlap",
                   "--overcommit", "--nodes=%d" % nodes, "--ntasks=%d" % nodes,
                   "--ntasks-per-node=1", "--mpi=none", "--cpu-bind=none", "--kill-on-bad-exit=0",
                   "--wait=0", "--chdir=/", "--export=HOME,USER,LOGNAME,SHELL,PATH,LANG",
                   "sh", "-c", self._order["start"]]  # fmt: skip
        pipe = subprocess.PIPE
        with contextlib.suppress(OSError):
            self._input = queue.SimpleQueue()
            self._process = subprocess.Popen(
                command,
                env=own_variables(),
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._input.put(framed(pack(PROGRAM, self._importer.modules)))
            self.send({name: self._order[name] for name in ("folder", "world_size")})
            for work in (self._read, self._write):
                arguments = self._process, self._input
                threading.Thread(target=work, args=arguments, daemon=True).start()

    def send(self, order: Json) -> None:
        self._input.put(encode(order) + b"\n")

    def close(self) -> None:
        """End the step: an allocation of the user may go on."""
        process = self._process
        if process is not None:
            self._input.put(b"")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_LIMIT)
            process.terminate()

    def _write(self, process: subprocess.Popen[bytes], orders: queue.SimpleQueue[bytes]) -> None:
        """Runs in a thread of its own: the step may start late."""
        assert process.stdin
        with contextlib.suppress(OSError), process.stdin as stream:
            for data in iter(orders.get, b""):
                stream.write(data)
                stream.flush()

    def _read(self, process: subprocess.Popen[bytes], orders: queue.SimpleQueue[bytes]) -> None:
        """Report what the watchers write. Runs in a thread of its own."""
        assert process.stdout
        joined, said = StepInput(), b""
        with process.stdout as stream:
            for line in iter(lambda: stream.readline(MAX_LINE), b""):
                try:
                    found = joined.add(line)
                except ValueError:
                    said = line
                    continue
                message = decode(found[1]) if found is not None else None
                if message is not None:
                    self._channel.send(message)
        status = process.wait()
        orders.put(b"")  # the other thread ends
        self.on_end()
        if status:
            self._failure = shown(said).strip() or "srun ended"
            self._report_at = time.monotonic() + END_LIMIT
