"""The Slurm program: submits a job on a login node, and reports its state and its output.

It speaks as a relay does, with the frames of `dtrain.node.agent.wire`. The launcher writes the
orders of `dtrain.node.slurm.orders`; ``ping`` is answered at once.

It writes messages, by ``type``:

    submitted   job: its number, or null if the run has no job
    refused     command, status, text: a command of Slurm failed, and no job was submitted
    job         text: what ``scontrol show job`` says, each time it changes; empty if Slurm no
                longer knows the job
    trouble     command, text: a command of Slurm failed. It will be repeated
    cancelling  the answer to ``cancel``
    stream      id, host, name: the next output file. Its DATA follows
    progress    host, name, said: a report of a worker, as an agent sends it
    sample, average, event   host, said or event: from the watcher of a machine
    unwatched   text: the step of the watchers ended with an error. It will be started again
    script      text: the last output of the job's script, in answer to ``finish``
    alive, bye

The launcher decides what a job's state means. Shipped to login nodes: Python 3.8, standard library
only.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import queue
import re
import select
import sys
import threading
import time

from dtrain.launchplan.names import rank_name
from dtrain.node.agent.folder import RESERVED, expand, listed
from dtrain.node.agent.launcher_channel import LauncherChannel
from dtrain.node.agent.wire import CHUNK, PREAMBLE, raw, shown
from dtrain.node.agent.worker_files import open_regular, read_regular
from dtrain.node.slurm.allocated import AllocationScript
from dtrain.node.slurm.commands import OUTPUT, BatchJob, CommandResult
from dtrain.node.slurm.reports import SlurmWorkerReports
from dtrain.node.slurm.watchers import Watchers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

    from dtrain.node.importer import Importer
    from dtrain.node.slurm.orders import FirstOrder, LaterOrder

STREAM = re.compile(rb"([a-z]+)-(0|[1-9][0-9]{0,8})\.(?:out|err)")
CLOCKS = re.compile(r"\b(?:RunTime|LastSchedEval)=\S*")
"""What changes in the state of a job although nothing has happened."""
QUEUED = re.compile(r"\bJobState=(?:PENDING|CONFIGURING)\b")
POLL = 0.1
"""Seconds between two looks at the output files."""
LIST_SECONDS = 1.0
"""Between two looks for new files."""
FIRST_LOOK, LAST_LOOK = 1.0, 10.0
"""Seconds between two questions to the controller: more while the job's state does not change."""
QUIET = 1.0
"""Seconds without new output after which a finished job's output is complete: a shared folder may
show the last bytes late."""


class Outputs:
    """The output files of a run, each read from an offset on: ``<folder>/<host>/worker-0.out``."""

    def __init__(
        self,
        folder: bytes,
        offsets: dict[str, dict[str, int]],
        roles: dict[str, int],
        torchruns: dict[str, tuple[int, int]],
        channel: LauncherChannel,
    ) -> None:
        """``roles``: the number of processes of each role. ``torchruns``: the first rank and the
        number of ranks of each torchrun."""
        self._folder = folder
        self._roles = roles
        self._offsets = offsets
        self._torchruns = torchruns
        self._channel = channel
        self._files: dict[bytes, list[int]] = {}
        """Number and offset of each file, and where it begins in its stream."""
        self._latest: dict[tuple[str, str], bytes] = {}
        self._list_at = 0.0

    def send(self, *, last: bool) -> bool:
        """Send new data; return whether there was any. ``last``: open every file, because a shared
        folder may know the size only then."""
        now = time.monotonic()
        if last or now >= self._list_at:
            self._list_at = now + LIST_SECONDS
            self._find()
        found = False
        for path, place in list(self._files.items()):
            found |= self._send(path, place, last)
        return found

    def any(self) -> bool:
        """Whether a machine has written something; looks every few seconds."""
        now = time.monotonic()
        if now < self._list_at:
            return False
        self._list_at = now + LIST_SECONDS
        paths = [os.path.join(self._folder, name) for name in listed(self._folder)]
        return any(map(os.path.isdir, paths))

    def _find(self) -> None:
        for host in sorted(listed(self._folder)):
            place = os.path.join(self._folder, host)
            for name in sorted(listed(place)):
                found = STREAM.fullmatch(name)
                # A program may keep files of its own there.
                if found and int(found[2]) < self._roles.get(found[1].decode(), 0):
                    self._add(os.path.join(place, name), shown(host), name.decode())
                elif name.endswith(b".ranks"):
                    for path, stream in self._ranks_of(os.path.join(place, name)):
                        self._add(path, shown(host), stream)

    def _ranks_of(self, folder: bytes) -> list[tuple[bytes, str]]:
        """The output files of torchrun's ranks, the oldest first, each with its stream's name:
        ``<run>/attempt_<n>/<local rank>/stdout.log``."""
        first, count = self._torchruns.get(
            shown(os.path.basename(folder)[: -len(b".ranks")]), (0, 0)
        )
        found: list[tuple[float, bytes, str]] = []
        for path in glob.glob(
            os.path.join(glob.escape(folder), b"*", b"attempt_*", b"*", b"std*.log")
        ):
            local, log = path.split(b"/")[-2:]
            suffix = {b"stdout.log": ".out", b"stderr.log": ".err"}.get(log)
            if suffix and local.isdigit() and len(local) <= 6 and int(local) < count:
                with contextlib.suppress(OSError):
                    began = os.stat(os.path.dirname(os.path.dirname(path))).st_mtime
                    found.append((began, path, rank_name(first + int(local)) + suffix))
        return [(path, stream) for _, path, stream in sorted(found)]

    def _add(self, path: bytes, host: str, name: str) -> None:
        """Send a file from now on. A restarted torchrun writes new files: they continue the stream
        of the last attempt's files, once these are sent."""
        if path in self._files:
            return
        base, latest = 0, self._latest.get((host, name))
        if latest is not None:
            _, offset, before = self._files[latest]
            if os.path.exists(latest) and os.stat(latest).st_size > offset:
                return
            base = before + offset
        stored = self._offsets.get(host, {}).get(name, 0) - base
        with contextlib.suppress(OSError):
            number, size = len(self._files) + 1, os.stat(path).st_size
            self._files[path] = [number, max(0, min(stored, size)), base]
            self._latest[host, name] = path
            self._channel.report("stream", id=number, host=host, name=name)

    def _send(self, path: bytes, place: list[int], last: bool) -> bool:
        number, offset, base = place
        try:
            if not last and os.stat(path).st_size <= offset:
                return False
            # Opened for each piece: there may be more files than a process may have open.
            fd = open_regular(path)
            try:
                data = os.pread(fd, CHUNK, offset)
            finally:
                os.close(fd)
        except OSError:
            return False
        if data:
            self._channel.send_data(number, base + offset, data)
            place[1] += len(data)
        return bool(data)


class StateWatch(threading.Thread):
    """Asks the controller for the job's state; an answer may take long."""

    def __init__(self, job: BatchJob) -> None:
        super().__init__(daemon=True)
        self.answers: queue.SimpleQueue[CommandResult] = queue.SimpleQueue()
        self._job = job
        self._asked = threading.Event()
        self._since = time.monotonic()
        """When the state has changed, or is about to."""

    def run(self) -> None:
        before: str | None = None
        while True:
            answer = self._job.describe()
            state = CLOCKS.sub("", answer.text)
            if state != before:
                before, self._since = state, time.monotonic()
                self.answers.put(answer)
            age = time.monotonic() - self._since
            self._asked.wait(min(LAST_LOOK, FIRST_LOOK + age / 10))
            self._asked.clear()

    def hurry(self) -> None:
        """Ask now, and soon again."""
        self._since = time.monotonic()
        self._asked.set()


class JobRelay:
    def __init__(self, stream: BinaryIO, channel: LauncherChannel, importer: Importer) -> None:
        self._orders: queue.SimpleQueue[LaterOrder] = queue.SimpleQueue()
        self._channel = channel
        self._importer = importer
        self._queued = True
        self._submitting = threading.Lock()
        """Held so that this program stays until it has saved the number of a job."""
        self._wake, self._woken = os.pipe()
        threading.Thread(target=self._listen, args=(stream,), daemon=True).start()

    def serve(self, order: FirstOrder) -> None:
        run, allocation = order["run"], order["allocation"]
        nodes = os.path.join(expand(order["run_dir"]), b"nodes")
        folder = os.path.join(nodes, raw(run))
        job = AllocationScript(run, folder, allocation) if allocation else BatchJob(run, folder)
        job.number = "" if order["op"] == "submit" else order["job"] or ""
        while not job.number:
            found = job.find()
            if not found.status:
                break
            self._report(found)
            if order["op"] in ("look", "end"):
                return
            time.sleep(LAST_LOOK)
        if order["op"] == "submit" and not job.number:
            with self._submitting:
                answer = job.submit(order)
            if answer.status:
                self._channel.report(
                    "refused", command=answer.command, status=answer.status, text=answer.text
                )
                return
        self._channel.report("submitted", job=job.number or None)
        if not job.number:
            return
        if order["op"] == "look" or order["op"] == "end":
            if order["op"] == "end":
                self._cancel(job, kill=True)
            self._report(job.describe())
            return
        place = os.path.join(nodes, raw(order["outputs"]))
        offsets = order["offsets"] if order["op"] == "follow" else {}
        outputs = Outputs(place, offsets, order["roles"], order["torchruns"], self._channel)
        reports = SlurmWorkerReports(place, order["op"] == "follow", self._channel)
        watchers = Watchers(order["watch"], self._importer, self._channel)
        self._follow(job, outputs, reports, watchers)
        watchers.close()
        script = read_regular(job.path(OUTPUT), RESERVED, -RESERVED)
        self._channel.report("script", text=(script or b"").decode("utf-8", "replace"))

    def _follow(
        self, job: BatchJob, outputs: Outputs, reports: SlurmWorkerReports, watchers: Watchers
    ) -> None:
        """Report the job until the launcher says that it is over."""
        watch = StateWatch(job)
        watch.start()
        watchers.on_end = watch.hurry  # they end with the job
        finish_at = 0.0
        kill: bool | None = None  # a job to cancel, and how
        cancel_at = 0.0
        while not finish_at or time.monotonic() < finish_at:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._report(watch.answers.get_nowait())
            with contextlib.suppress(queue.Empty):
                while True:
                    order = self._orders.get_nowait()
                    if order["op"] == "cancel":
                        kill, cancel_at = order["kill"], 0.0
                    elif order["op"] == "stacks":
                        watchers.send({name: order[name] for name in ("host", "abort", "ras")})
                    elif order["op"] == "fail":
                        self._trouble(job.fail(order["restart"]))
                    elif order["op"] == "finish":
                        finish_at = time.monotonic() + QUIET
            if kill is not None and time.monotonic() >= cancel_at:
                cancel_at = time.monotonic() + LAST_LOOK
                if self._cancel(job, kill):
                    kill = None
                watch.hurry()
            if self._queued and not finish_at:
                # The launcher learns the hosts before it gets their output.
                busy = False
                if outputs.any():
                    watch.hurry()
            else:
                busy = outputs.send(last=finish_at > 0)
                reports.send(last=finish_at > 0)
                if not finish_at:
                    watchers.poll(job.number)
            if busy and finish_at:
                finish_at = time.monotonic() + QUIET
            if not busy and select.select([self._wake], [], [], POLL)[0]:
                os.read(self._wake, 4096)

    def _cancel(self, job: BatchJob, kill: bool) -> bool:
        """Whether Slurm has accepted it. Otherwise it will be repeated."""
        answer = job.cancel(kill)
        self._channel.report("cancelling")
        return not self._trouble(answer)

    def _trouble(self, answer: CommandResult) -> bool:
        """Whether a command failed, which is reported."""
        if answer.status:
            self._channel.report("trouble", command=answer.command, text=answer.text)
        return answer.status != 0

    def _report(self, answer: CommandResult) -> None:
        if not self._trouble(answer):
            self._queued = bool(QUEUED.search(answer.text))
            self._channel.report("job", text=answer.text)

    def _listen(self, stream: BinaryIO) -> None:
        """Answers pings even while a command of Slurm takes long. Runs in a thread of its own."""
        for line in iter(stream.readline, b""):
            order = json.loads(line)
            if order["op"] == "leave":
                break
            if order["op"] == "ping":
                self._channel.report("alive")
            else:
                self._orders.put(order)
                os.write(self._woken, b"\0")
        # The launcher leaves, or its connection broke; the job goes on.
        self._submitting.acquire()
        os._exit(0)


def main(stream: BinaryIO, importer: Importer) -> None:
    channel = LauncherChannel()
    channel.write(PREAMBLE)
    line = stream.readline()
    if line:
        JobRelay(stream, channel, importer).serve(json.loads(line))
    channel.report("bye")
    sys.stdout.flush()
    os._exit(0)
