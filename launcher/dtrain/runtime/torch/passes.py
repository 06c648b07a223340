"""The forward and backward passes of one optimizer step, on one data rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.runtime.layout import Layout
from dtrain.runtime.torch.pipeline import build_schedule, owners_of_stages, receive, send
from dtrain.runtime.torch.precision import LossScale
from dtrain.runtime.torch.sharding import reducing

Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean loss of a micro-batch, from the model's output and the targets."""
TargetCount = Callable[[Tensor], Tensor]
"""The number of targets that a loss sums over."""


class Passes(Protocol):
    """Forward and backward passes. Each method takes this data rank's part of a global batch, and
    returns its mean loss, or ``None`` on a rank without the model's last stage."""

    def gradients(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Add to the parameters' ``grad``, scaled by the loss scale."""

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Compute the loss only; leave gradients unchanged."""


def in_float32(loss: Loss) -> Loss:
    """``loss`` of the output in float32: 16 bits are too few to sum over a vocabulary."""
    return lambda output, targets: loss(output.float(), targets)


class CountedLoss:
    """A loss that is a sum over some of the targets, such as those that are not padding.

    Micro-batches have different numbers of them, so a mean of their means would not be the mean
    over the global batch. Here, each sum is divided by the number in an average micro-batch.
    """

    def __init__(self, loss: Loss, count: TargetCount, layout: Layout) -> None:
        self._loss = loss
        self._count = count
        self._micro_batches = dist.get_world_size() * layout.grad_accumulation
        self._average: Tensor | float = 1.0

    @contextmanager
    def counted(self, inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For `PreparedPasses` over this rank's part of a global batch. All ranks call it."""
        # Ranks that share a part of the model count the same targets, and as many micro-batches.
        total = self._count(targets).detach().float().clone()
        dist.all_reduce(total)
        self._average = total.clamp(min=1) / self._micro_batches
        yield inputs, targets

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        return self._loss(output, targets) / self._average


@dataclass(frozen=True, slots=True)
class PreparedPasses:
    """Passes within a context that yields their inputs and targets; see `Passes`."""

    passes: Passes
    prepared: Callable[[Tensor, Tensor], AbstractContextManager[tuple[Tensor, Tensor]]]

    def gradients(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        with self.prepared(inputs, targets) as given:
            return self.passes.gradients(*given)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        with self.prepared(inputs, targets) as given:
            return self.passes.loss(*given)


class MicroBatches:
    """Runs micro-batches through the whole model, one after the other."""

    def __init__(self, module: nn.Module, layout: Layout, loss: Loss, scale: LossScale) -> None:
        self._module = module
        self._layout = layout
        self._loss = loss
        self._scale = scale

    def gradients(self, inputs: Tensor, targets: Tensor) -> Tensor:
        count = self._layout.grad_accumulation
        losses = []
        for index, (part, target) in enumerate(
            zip(inputs.chunk(count), targets.chunk(count), strict=True)
        ):
            with reducing(self._module, self._layout, last=index == count - 1):
                loss = self._loss(self._module(part), target)
                (loss * (self._scale.scale / count)).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    @torch.no_grad()
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        count = self._layout.grad_accumulation
        parts = zip(inputs.chunk(count), targets.chunk(count), strict=True)
        return torch.stack([self._loss(self._module(x), target) for x, target in parts]).mean()


class Pipelined:
    """Runs micro-batches through the pipeline stages, in the order of the schedule."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        layout: Layout,
        group: dist.ProcessGroup,
        device: torch.device,
        loss: Loss,
        scale: LossScale,
    ) -> None:
        self._stages = stages
        """The stages on this rank, by number."""
        self._layout = layout
        self._group = group
        self._device = device
        self._loss = loss
        self._scale = scale
        self._owners = owners_of_stages(layout)
        self._schedule = build_schedule(
            layout,
            stages,
            group,
            device,
            lambda output, targets: loss(output, targets) * scale.scale,
        )

    def gradients(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        given = (inputs,) if 0 in self._stages else ()
        last = len(self._owners) - 1 in self._stages
        wanted: dict[str, Any] = {"target": targets, "losses": losses} if last else {}
        self._schedule.step(*given, return_outputs=False, **wanted)
        if not last:
            return None
        return torch.stack([loss.detach() for loss in losses]).mean() / self._scale.scale

    @torch.no_grad()
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """See `Passes`.

        Does not use the schedule's own ``eval``: zero-bubble V lacks it, and it would make the next
        training step exchange the shapes of all messages again.
        """
        count = self._layout.grad_accumulation
        losses = []
        for stream, target in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            for number, owner in enumerate(self._owners):
                if number not in self._stages:
                    continue
                before = self._owners[number - 1]
                if number > 0 and before != owner:
                    stream = receive(before, self._group, self._device)
                stream = self._stages[number](stream)
                if number + 1 == len(self._owners):
                    losses.append(self._loss(stream, target))
                elif self._owners[number + 1] != owner:
                    send(stream, self._owners[number + 1], self._group)
        return torch.stack(losses).mean() if losses else None
