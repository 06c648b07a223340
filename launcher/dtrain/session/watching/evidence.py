"""What one host has reported about its workers. Pure: times are arguments.

The link's reader adds to it. Other threads may read it at any time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import TypeVar

from dtrain.failures.cause import Failure
from dtrain.failures.kernel import KernelMessage, understand
from dtrain.launchplan import names
from dtrain.messages import agent as messages

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

MAX_KERNEL_MESSAGES = 1000
MAX_PROCESSES = 1000
"""Processes of one host of which something is kept: its workers may have written its events."""
CLOCK_READINGS = 60
"""The latest readings of a host's clock that count, one every 5 s: clocks drift, and time servers
set them."""


class HostEvidence:
    def __init__(self, host: str, gpus: Collection[int]) -> None:
        """``gpus``: indices of the GPUs that the job uses on the host; empty means all."""
        self.stacks: dict[str, str] = {}
        """Stacks of workers from py-spy, by rank, or by role and index."""
        self.unread: dict[str, str] = {}
        """Why py-spy has no stack of the other workers."""
        self.collectives: dict[int, tuple[messages.ProcessGroup, ...]] = {}
        """The last collectives of each rank, from torch's flight recorder."""
        self.ras = ""
        """What NCCL's RAS service has reported."""
        self.finished: dict[str, float] = {}
        """When processes exited by themselves with status 0, on the launching machine's clock, by
        rank, or by role and index."""
        self.stacks_complete = False
        """Whether the host has answered the last stack request in full."""
        self.kernel: list[KernelMessage] = []
        """Problems that the host's kernel has logged since the start."""
        self.last_activity = 0.0
        """When a worker last wrote output or progress (`time.monotonic`)."""
        self.connected: bool | None = None
        """Whether a worker was ever connected to another worker; None if that is not known."""
        self.killed: list[Failure] = []
        """Workers that a signal ended while the job was being stopped."""
        self._host = host
        self._gpus = gpus
        self._clock_readings: deque[float] = deque(maxlen=CLOCK_READINGS)
        self._clock_offset = math.inf

    def expect_stacks(self) -> None:
        """Discard earlier stacks: a new request is about to be sent."""
        self.stacks_complete = False
        self.stacks, self.unread, self.collectives, self.ras = {}, {}, {}, ""

    def compare_clocks(self, theirs: float, now: float, *, current: bool = True) -> None:
        """Measure the clock offset from a time that the host has sent. ``current``: it was the
        host's time when the host sent it. An event may be sent again much later.

        Each difference is the offset plus the message's travel time, so the smallest one is the
        most accurate.
        """
        if current or now - theirs < self._clock_offset:
            self._clock_readings.append(now - theirs)
            self._clock_offset = min(self._clock_readings)

    def add(self, event: messages.Event) -> None:
        match event:
            case messages.Stack(role=role, index=index, rank=rank, text=text, problem=problem):
                label = names.label(role, index, rank)
                if text:
                    _keep(self.stacks, label, text)
                else:
                    _keep(self.unread, label, problem)
            case messages.Ras(text=text):
                self.ras = text
            case messages.StacksDone():
                self.stacks_complete = True
            case messages.Collectives(rank=rank, groups=groups):
                _keep(self.collectives, rank, groups)
            case messages.Exited(role=role, index=index, rank=rank, failed=False, time=then):
                _keep(self.finished, names.label(role, index, rank), then + self._clock_offset)
            case messages.Ended(connected=connected):
                self.connected = connected
            case messages.Kernel(lines=lines, gpus=gpus):
                ours = [(then + self._clock_offset, line) for then, line in lines]
                found = understand(ours, gpus, self._gpus)
                self.kernel = [*self.kernel, *found][-MAX_KERNEL_MESSAGES:]

    def failures(self, event: messages.Exited) -> tuple[Failure, ...]:
        """The failure of the process, or of each rank that torchrun ran. Empty if the process
        succeeded or was stopped."""
        if event.code == 0:
            return ()
        if event.stopping:
            if event.signal is not None and not event.ranks:
                self.killed.append(self._failure(event))
            return ()
        if event.ranks:
            of_torchrun = self._failure(event)
            return tuple(
                replace(
                    of_torchrun,
                    role="worker",
                    index=rank.rank,
                    rank=rank.rank,
                    time=(rank.time or event.time) + self._clock_offset,
                    code=rank.exitcode,
                    signal=rank.signal,
                    message=rank.message,
                    traceback=rank.traceback,
                    pid=rank.pid,
                )
                for rank in event.ranks
            )
        return (self._failure(event),)

    def _failure(self, event: messages.Exited) -> Failure:
        error = event.error or messages.ErrorReport()
        return Failure(
            host=self._host,
            role=event.role,
            index=event.index,
            rank=event.rank,
            # A process may take seconds to exit after its error.
            time=(error.time or event.time) + self._clock_offset,
            code=event.code,
            signal=event.signal,
            message=error.message,
            traceback=error.traceback,
            pid=event.pid,
            out_of_memory=event.out_of_memory,
        )


def _keep(kept: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    if key in kept or len(kept) < MAX_PROCESSES:
        kept[key] = value
