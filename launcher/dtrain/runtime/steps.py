"""Measures the steps of this process, for the launcher's search for slow and hanging ranks.

In each step, a process waits for data, computes, and waits for the other processes. `StepRecorder`
averages `STEPS` steps to a block. A thread writes new blocks and the number of steps to the
progress file after the first step and every `BETWEEN_EVENTS` seconds, so a step costs microseconds.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

STEPS = 10
"""Steps of one block."""
BETWEEN_EVENTS = 0.5
"""Seconds between events."""
STANDING = 5.0
"""Seconds without a step after which an event says whether the process waits."""
MAX_BLOCKS = 64
"""Blocks of one event. Older ones are dropped."""

MAX_FRAMES = 12
"""Innermost functions of the main thread that are considered."""
PHASES = ("data", "save", "load")
"""What a process may do instead of steps: wait for data, and save or load a checkpoint."""
_WAITS = {"/torch/distributed/": "ranks", "/torch/utils/data/": "data"}

_T = TypeVar("_T")


@dataclass(frozen=True)
class Step:
    """One step of this process; times in seconds."""

    number: int
    whole: float | None
    """None for the first step, because its start is unknown."""
    data: float
    """Wait for data."""
    waited: float
    """Wait for the other processes."""


class StepRecorder:
    """The steps of this process."""

    def __init__(self, tell: Callable[..., None]) -> None:
        """``tell`` writes an event, given its kind and its fields."""
        self.group = 0
        """Processes that do the same work have the same group, such as a pipeline stage."""
        self._tell = tell
        self._done = 0
        self._counts_itself = False
        self._waiting_for = ""
        self._since = 0.0
        """When the last step ended."""
        self._data = self._waited = 0.0
        self._samples: list[tuple[float, float | None, float]] = []
        self._queued_before = 0.0
        self._blocks: deque[list[float | None]] = deque(maxlen=MAX_BLOCKS)
        self._phases = dict.fromkeys(PHASES, 0.0)
        """Seconds since the process began."""
        self._written: tuple[object, ...] = (0, None, {})
        # Reentrant, because a signal handler of the script may save a checkpoint.
        self._writing = threading.RLock()
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._forked)

    @contextlib.contextmanager
    def waiting(self, wait: str = "ranks") -> Iterator[None]:
        """The process waits for the other ``ranks``, or for its ``data``."""
        began = time.monotonic()
        before = self.begin_wait(wait)
        try:
            yield
        finally:
            self.end_wait(began, wait, before)

    def begin_wait(self, wait: str = "ranks") -> str:
        """Like `waiting`, without a ``with``. Returns what the process waited for before."""
        before, self._waiting_for = self._waiting_for, wait
        return before

    def end_wait(self, began: float, wait: str = "ranks", before: str = "") -> None:
        """End a wait that began at ``began`` (`time.monotonic`)."""
        self._waiting_for = before
        self.add_wait(time.monotonic() - began, wait)

    def add_wait(self, spent: float, wait: str) -> None:
        """Count ``spent`` seconds of a wait."""
        if wait == "data":
            self._data += spent
            self._phases["data"] += spent
        else:
            self._waited += spent

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The process is in a phase of `PHASES`. Raises ValueError for another name."""
        if name not in PHASES:
            raise ValueError(f"phase({name!r}): expected one of {', '.join(PHASES)}")
        if name == "data":
            with self.waiting("data"):
                yield
            return
        began = time.monotonic()
        try:
            yield
        finally:
            self._phases[name] += time.monotonic() - began
            if self._since:
                self.write()  # at once: work that is lost later was done after this

    def data(self, batches: Iterable[_T]) -> Iterator[_T]:
        """``batches``, with the waits for them counted."""
        iterator = iter(batches)
        while True:
            with self.waiting("data"):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def end_step(self, count: int = 1) -> Step:
        """Count a step. The caller passes it to `add` once its computation is known. ``count``
        steps at once are not passed to it."""
        self._counts_itself = True
        return self._end_step(self._done + count)

    def report(self, step: int, compute: float | None, data: float | None) -> None:
        """The script has done step number ``step``. Ignored if `end_step` counts the steps."""
        if not self._counts_itself:
            if data is not None:
                # In place of what `phase` has counted in this step. 0 for NaN, too.
                spent = max(0.0, float(data))
                self._phases["data"] += spent - self._data
                self._data = spent
            ended = self._end_step(step)
            if compute is not None or data is not None:
                self.add(ended, None if compute is None else max(0.0, float(compute)))

    def _end_step(self, number: int) -> Step:
        now = time.monotonic()
        whole = now - self._since if self._since else None
        step = Step(number, whole, self._data, self._waited)
        self._data = self._waited = 0.0
        self._done, self._since = number, now
        if self._thread is None and os.environ.get("DTRAIN_RUN_DIR"):
            self._thread = threading.Thread(target=self._write_all, daemon=True)
            self._thread.start()
            atexit.register(self.write)
        return step

    def add(self, step: Step, compute: float | None) -> None:
        """Add a step to its block. ``compute``: its seconds of computation, if they are known."""
        if step.whole is not None:
            self._samples.append((step.whole, compute, step.data))
        if step.number % STEPS == 0:
            queued, self._queued_before = self._queued_before, seconds_queued()
            if len(self._samples) == STEPS:
                self._end_block(step.number // STEPS - 1, (self._queued_before - queued) / STEPS)
            self._samples.clear()

    def _end_block(self, number: int, queued: float) -> None:
        # Without the longest step: every tenth may save a checkpoint on one rank alone.
        samples = sorted(self._samples, key=lambda one: (one[1] or 0.0) + one[2])[:-1]
        whole = sum(one[0] for one in samples) / len(samples)
        data = sum(one[2] for one in samples) / len(samples)
        computes = [one[1] for one in samples if one[1] is not None]
        compute = sum(computes) / len(samples) if len(computes) == len(samples) else None
        self._blocks.append(
            [
                number,
                *(one if one is None else round(one, 7) for one in (whole, compute, data, queued)),
            ]
        )

    def _forked(self) -> None:
        """The thread that may have held the lock is not in this new process."""
        self._writing = threading.RLock()

    def _write_all(self) -> None:
        while True:
            # After the first step at once: its report parts the waits of the start from later ones.
            self.write()
            time.sleep(BETWEEN_EVENTS)

    def write(self) -> None:
        """Write what is new."""
        with self._writing:
            stands = time.monotonic() - self._since > STANDING
            waits = (self._waiting_for or main_thread_waits()) if stands else None
            phases = {name: round(spent, 3) for name, spent in self._phases.items() if spent}
            state = (self._done, waits, phases)
            blocks = [self._blocks.popleft() for _ in range(len(self._blocks))]
            if state != self._written or blocks:
                self._written = state
                self._tell(
                    "steps",
                    done=self._done,
                    waits=waits,
                    group=self.group,
                    blocks=blocks,
                    phases=phases,
                )


def main_thread_waits() -> str:
    """What the main thread waits for, by its stack: ``ranks``, ``data``, or empty if unknown."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        file = frame.f_code.co_filename
        for part, wait in _WAITS.items():
            if part in file:
                return wait
        if "/lib/python" not in file:  # the script's own function
            break
        frame = frame.f_back
    return ""


def seconds_queued() -> float:
    """Seconds in which this thread could have run, but waited for a CPU. 0 if unknown."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
