"""Measures how long this rank computes in a step before it waits for the others.

DistributedDataParallel reduces gradients during the backward pass, and waits for the other ranks
only at its end. So a rank has finished its own computation once it has its last gradient, which is
that of one of the first parameters. On a GPU, CUDA events mark the start of the forward pass and
this moment in the compute stream. They are read once the GPU has passed them, so no step waits.

Under FSDP, tensor and pipeline parallelism, ranks also wait within the passes. There, computation
cannot be separated from the waits, so only the wait for data is measured.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dtrain.runtime.progress import steps
from dtrain.runtime.steps import Step

FIRST = 2
"""Number of parameters, the first ones, whose gradients are watched."""
PENDING = 64
"""Steps whose events are kept. A GPU is never that far behind."""


class StepTimer:
    """Measures the steps of one model. Use it around the passes, and call `end_step`.

    timer = StepTimer([model], device)
    for inputs, targets in timer.data(loader):
        with timer.passes():
            loss(model(inputs), targets).backward()
        optimizer.step()
        timer.end_step()
    """

    def __init__(
        self, modules: Sequence[nn.Module], device: torch.device, *, local: bool = True
    ) -> None:
        """``local``: whether the passes wait for other ranks only after the last gradient."""
        parameters = [one for module in modules for one in module.parameters()]
        self._cuda = device.type == "cuda"
        self._local = local
        self._last_gradient: float | None = None
        self._began: torch.cuda.Event | None = None
        self._ended: torch.cuda.Event | None = None
        self._recorded = False
        """Whether the last gradient of the step is marked."""
        self._pending: deque[tuple[Step, torch.cuda.Event, torch.cuda.Event]] = deque()
        if local:
            for parameter in [one for one in parameters if one.requires_grad][:FIRST]:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._after_gradient
                )
            for module in modules:
                module.register_forward_pre_hook(self._before_forward)

    data = staticmethod(steps.data)
    """Iterate over batches; the time until each one counts as a wait for data."""

    def _before_forward(self, _module: nn.Module, _inputs: object) -> None:
        if self._last_gradient is not None:  # of an earlier micro-batch
            steps.begin_wait("")
            self._last_gradient = None

    def _after_gradient(self, _parameter: Tensor) -> None:
        if self._cuda:
            if self._ended is not None:
                self._ended.record()
                self._recorded = True
            return
        if self._last_gradient is None:
            steps.begin_wait()
        self._last_gradient = time.monotonic()

    @contextmanager
    def passes(self) -> Iterator[None]:
        """All forward and backward passes of a step."""
        if self._cuda and self._local:
            self._began, self._ended = _event(), _event()
            self._began.record()
            self._recorded = False
        self._last_gradient = None
        yield
        if self._last_gradient is not None:
            steps.end_wait(self._last_gradient)

    def end_step(self) -> None:
        """The step is done."""
        step = steps.end_step()
        if not self._local or step.whole is None:
            steps.add(step, None)
        elif not self._cuda:
            steps.add(step, max(0.0, step.whole - step.data - step.waited))
        elif self._began is None or self._ended is None or not self._recorded:
            steps.add(step, None)
        else:
            self._pending.append((step, self._began, self._ended))
            self._read_events()

    def _read_events(self) -> None:
        while self._pending:
            step, began, ended = self._pending[0]
            if not ended.query():  # type: ignore[no-untyped-call]
                if len(self._pending) > PENDING:
                    self._pending.clear()
                return
            self._pending.popleft()
            steps.add(step, began.elapsed_time(ended) / 1e3)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
