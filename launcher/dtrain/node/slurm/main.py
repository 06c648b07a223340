"""The Slurm program: submits a job on a login node, and reports its state and its output.

It speaks as a relay does, with the frames of `dtrain.node.agent.wire`, the orders of
`dtrain.node.slurm.orders` and the messages of `dtrain.messages.slurm`.

The launcher decides what a job's state means.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import select
import sys
import threading
import time

from dtrain.node.agent.folder import RESERVED, expand
from dtrain.node.agent.launcher_channel import LauncherChannel
from dtrain.node.agent.wire import CHUNK, PREAMBLE, raw
from dtrain.node.agent.worker_files import read_regular
from dtrain.node.revision import revision
from dtrain.node.slurm.allocated import AllocationScript
from dtrain.node.slurm.commands import OUTPUT, BatchJob, CommandResult
from dtrain.node.slurm.outputs import Outputs
from dtrain.node.slurm.reports import SlurmWorkerReports
from dtrain.node.slurm.watchers import Watchers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO, Callable, TypeVar

    from dtrain.node.importer import Importer
    from dtrain.node.slurm.orders import FirstOrder, LaterOrder

    _Item = TypeVar("_Item")

CLOCKS = re.compile(r"\b(?:RunTime|LastSchedEval)=\S*")
"""What changes in the state of a job although nothing has happened."""
QUEUED = re.compile(r"\bJobState=(?:PENDING|CONFIGURING)\b")
POLL, LONGEST_POLL = 0.1, 2.0
"""Seconds between two looks at the output files: more if a look takes long, as it does where many
files are in a slow shared folder."""
FIRST_LOOK, LAST_LOOK = 1.0, 10.0
"""Seconds between two questions to the controller: more while the job's state does not change."""
QUIET = 1.0
"""Seconds without new output after which a finished job's output is complete: a shared folder may
show the last bytes late."""


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
        self._kill: bool | None = None
        """How to cancel the job; None if it need not be cancelled, or Slurm has accepted it."""
        self._cancel_at = 0.0
        self._finish_at = 0.0
        """When to stop; 0 before the launcher says that the job is over."""
        self._submitting = threading.Lock()
        """Held so that this program stays until it has saved the number of a job."""
        self._wake, self._woken = os.pipe()
        threading.Thread(target=self._listen, args=(stream,), daemon=True).start()

    def serve(self, order: FirstOrder) -> None:
        run, allocation = order["run"], order["allocation"]
        nodes = os.path.join(expand(order["run_dir"]), b"nodes")
        folder = os.path.join(nodes, raw(run))
        job = AllocationScript(run, folder, allocation) if allocation else BatchJob(run, folder)
        if order["op"] != "submit":
            job.number = order["job"] or job.number
        patient = order["op"] not in ("look", "end")
        if not find(job, self._report, patient=patient):
            return
        uncertain = order["op"] != "look" and job.may_come
        if uncertain:
            find_late(job, self._report, patient=patient)
        if order["op"] == "submit" and not job.number:
            with self._submitting:
                answer = job.submit(order)
            if answer.uncertain:
                uncertain = True
                self._channel.report("trouble", command="sbatch", text=answer.text)
                find_late(job, self._report, patient=True)
            if answer.status and not job.number:
                self._channel.report("refused", **vars(answer), uncertain=uncertain)
                return
            if order["code"] is not None:
                workdir, code = expand(order["workdir"]), os.path.expanduser(raw(order["code"]))
                threading.Thread(
                    target=self._report_code, args=(os.path.join(workdir, code),), daemon=True
                ).start()
        self._channel.report("submitted", job=job.number or None, uncertain=uncertain)
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
        while not self._finish_at or time.monotonic() < self._finish_at:
            for answer in taken(watch.answers):
                self._report(answer)
            for order in taken(self._orders):
                self._obey(order, job, watchers)
            if self._kill is not None and time.monotonic() >= self._cancel_at:
                self._cancel_at = time.monotonic() + LAST_LOOK
                if self._cancel(job, self._kill):
                    self._kill = None
                watch.hurry()
            begun, sent, pause = time.monotonic(), 0, POLL
            if self._finish_at:
                sent = outputs.send(last=True)
                reports.send(outputs.names, last=True)
                if sent:
                    self._finish_at = time.monotonic() + QUIET
            elif not self._queued:
                sent = outputs.send(last=False)
                reports.send(outputs.names, last=False)
                watchers.poll(job.number)
                pause = min(max(POLL, 9 * (time.monotonic() - begun)), LONGEST_POLL)
            elif outputs.any():
                watch.hurry()  # the launcher learns the hosts before it gets their output
            if sent < CHUNK and select.select([self._wake], [], [], pause)[0]:
                os.read(self._wake, 4096)

    def _obey(self, order: LaterOrder, job: BatchJob, watchers: Watchers) -> None:
        if order["op"] == "cancel":
            self._kill, self._cancel_at = order["kill"], 0.0
        elif order["op"] == "stacks":
            watchers.send({name: order[name] for name in ("host", "abort", "ras")})
        elif order["op"] == "fail":
            self._trouble(job.fail(order["restart"]))
        elif order["op"] == "finish":
            self._finish_at = time.monotonic() + QUIET

    def _report_code(self, folder: bytes) -> None:
        found = revision(folder)
        if found is not None:
            self._channel.report("code", revision=found)

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
            if order["op"] == "ping":
                self._channel.report("alive")
            else:
                self._orders.put(order)
                os.write(self._woken, b"\0")
        # The launcher leaves, or its connection broke; the job goes on.
        self._submitting.acquire()
        os._exit(0)


def find(job: BatchJob, report: Callable[[CommandResult], None], *, patient: bool) -> bool:
    """Set the number of a job that was submitted. ``patient``: ask until Slurm answers. Whether it
    has answered."""
    while not job.number:
        found = job.find()
        if not found.status:
            break
        report(found)
        if not patient:
            return False
        time.sleep(LAST_LOOK)
    return True


def find_late(job: BatchJob, report: Callable[[CommandResult], None], *, patient: bool) -> None:
    """Look for a job that the controller may have accepted although sbatch failed. The first answer
    of a controller that wakes up may come before the job."""
    for _ in range(2):
        if not job.number:
            time.sleep(LAST_LOOK)
            find(job, report, patient=patient)


def taken(waiting: queue.SimpleQueue[_Item]) -> Iterator[_Item]:
    """What waits in a queue now."""
    with contextlib.suppress(queue.Empty):
        while True:
            yield waiting.get_nowait()


def main(stream: BinaryIO, importer: Importer) -> None:
    channel = LauncherChannel()
    channel.write(PREAMBLE)
    line = stream.readline()
    if line:
        JobRelay(stream, channel, importer).serve(json.loads(line))
    channel.report("bye")
    sys.stdout.flush()
    os._exit(0)
