"""Measures how long this rank computes in a step before it waits for the others.

DistributedDataParallel reduces gradients during the backward pass, and waits for the other ranks
only at its end. So a rank has finished its own computation once it has its last gradient, which is
that of one of the first parameters. On a GPU, CUDA events mark the start of the forward pass and
this moment in the compute stream. They are read once the GPU has passed them, so no step waits.

Under FSDP and pipeline parallelism, ranks also wait within the passes, but not within a block:
parameters and activations arrive before its forward pass begins. So the forward passes of a few
blocks are measured, and the computation of a step is estimated from them. Under tensor, context and
expert parallelism, ranks wait for each other within a block, but not within its Linear layers: what
these need is gathered before, and what they return is summed after. There, only these layers are
measured, and they stand for the rest of the block.

The CUDA path has run only with simulated events, never on a GPU.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.runtime.progress import steps
from dtrain.runtime.steps import Step

FIRST = 2
"""Number of parameters, the first ones, whose gradients are watched."""
MEASURED = 4
"""Blocks whose forward pass is measured, at most."""
PASSES = 3
"""A backward pass takes twice as long as a forward pass."""
PENDING = 64
"""Steps whose events are kept. A GPU is never that far behind."""


TYPE_CHECKING = False
if TYPE_CHECKING:
    _Marks = list[tuple[torch.cuda.Event, torch.cuda.Event]]


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
        self,
        modules: Sequence[nn.Module],
        device: torch.device,
        *,
        local: bool = True,
        blocks: Sequence[nn.Module] = (),
        layers: bool = False,
    ) -> None:
        """``local``: whether the passes wait for other ranks only after the last gradient.
        Otherwise, ``blocks`` are measured: equal modules that do not wait for other ranks. If they
        do, ``layers`` measures only their Linear layers."""
        parameters = [one for module in modules for one in module.parameters()]
        self._cuda = device.type == "cuda"
        self._local = local
        self._last_gradient: float | None = None
        self._began: torch.cuda.Event | None = None
        self._ended: torch.cuda.Event | None = None
        self._recorded = False
        """Whether the last gradient of the step is marked."""
        self._pending: deque[tuple[Step, _Marks, float]] = deque()
        """Steps whose events the GPU may not have passed, with the factor of their times."""
        self._blocks = (
            _Blocks(blocks, cuda=self._cuda, layers=layers) if blocks and not local else None
        )
        if local:
            for parameter in [one for one in parameters if one.requires_grad][:FIRST]:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _Hook(self._after_gradient)
                )
            for module in modules:
                module.register_forward_pre_hook(_Hook(self._before_forward))

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
        if self._blocks is not None:
            self._blocks.begin()
        try:
            yield
        finally:
            if self._blocks is not None:
                self._blocks.measures = False
            if self._last_gradient is not None:
                steps.end_wait(self._last_gradient)

    def end_step(self) -> None:
        step = steps.end_step()
        blocks = self._blocks
        if step.whole is None:
            steps.add(step, None)
        elif not self._cuda:
            if blocks is not None:
                steps.add(step, blocks.seconds * blocks.factor)
            else:
                own = max(0.0, step.whole - step.data - step.waited)
                steps.add(step, own if self._local else None)
        elif blocks is not None and blocks.marks:
            self._later(step, blocks.marks, blocks.factor)
        elif self._began is not None and self._ended is not None and self._recorded:
            self._later(step, [(self._began, self._ended)], 1.0)
        else:
            steps.add(step, None)

    def _later(self, step: Step, marks: _Marks, factor: float) -> None:
        """Add a step once the GPU has passed its marks, and those before it."""
        self._pending.append((step, marks, factor))
        while self._pending:
            step, marks, factor = self._pending[0]
            if not marks[-1][1].query():  # type: ignore[no-untyped-call]
                if len(self._pending) > PENDING:
                    self._pending.clear()
                return
            self._pending.popleft()
            milliseconds = sum(began.elapsed_time(ended) for began, ended in marks)
            steps.add(step, milliseconds / 1e3 * factor)


class _Blocks:
    """The forward passes of a few of ``blocks``, within `StepTimer.passes`."""

    def __init__(self, blocks: Sequence[nn.Module], *, cuda: bool, layers: bool) -> None:
        stride = -(-len(blocks) // MEASURED)
        chosen = blocks[::stride]
        self.factor = PASSES * len(blocks) / len(chosen)
        self.measures = False
        self.seconds = 0.0
        self.marks: _Marks = []
        self._cuda = cuda
        self._began: float | torch.cuda.Event | None = None
        inner = [one for block in chosen for one in block.modules() if isinstance(one, nn.Linear)]
        for module in inner if layers else chosen:
            # Next to the computation: other hooks wait for parameters and for other ranks.
            module.register_forward_pre_hook(_Hook(self._begin_forward))
            module.register_forward_hook(_Hook(self._end_forward), prepend=True)

    def begin(self) -> None:
        self.measures, self.seconds, self.marks, self._began = True, 0.0, [], None

    def _begin_forward(self, _module: nn.Module, _inputs: object) -> None:
        if self.measures and self._cuda:
            self._began = _event()
            self._began.record()
        elif self.measures:
            self._began = time.monotonic()

    def _end_forward(self, _module: nn.Module, _inputs: object, _result: object) -> None:
        began, self._began = self._began, None
        if isinstance(began, float):
            self.seconds += time.monotonic() - began
        elif began is not None:
            ended = _event()
            ended.record()
            self.marks.append((began, ended))


class _Hook:
    """A hook that copies and stored files of its module do not have: events of a GPU cannot be
    copied, and a copy is not the model that is trained. A compiled graph leaves it out."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_ignore,)


def _ignore(*_args: Any) -> None:
    pass


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
