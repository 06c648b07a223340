"""The forward and backward passes of one optimizer step, on one data rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from dtrain.runtime.layout import Layout
from dtrain.runtime.torch.pipeline import Schedule
from dtrain.runtime.torch.precision import LossScale
from dtrain.runtime.torch.sharding import reducing

Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean loss of a micro-batch, from what the model returns and the targets."""


class Passes(Protocol):
    """Ways through the model. Each method takes what this data rank has of a global batch, and
    returns its mean loss, or ``None`` on a rank that does not hold the model's end."""

    def gradients(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Add to the parameters' ``grad``, scaled by the loss scale."""

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Leave gradients alone."""


def in_float32(loss: Loss) -> Loss:
    """``loss`` of the output in float32: 16 bits are too few to sum over a vocabulary."""
    return lambda output, targets: loss(output.float(), targets)


class MicroBatches:
    """One micro-batch after the other through the whole model."""

    def __init__(self, module: nn.Module, layout: Layout, loss: Loss, scale: LossScale) -> None:
        self._module = module
        self._layout = layout
        self._loss = loss
        self._scale = scale

    def gradients(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See `Passes`."""
        count = self._layout.grad_accumulation
        losses = []
        for index, (part, target) in enumerate(
            zip(inputs.chunk(count), targets.chunk(count), strict=True)
        ):
            with reducing(self._module, self._layout, last=index == count - 1):
                loss = self._loss(self._module(part), target)
                (loss * (self._scale.scale / count)).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    @torch.no_grad()
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See `Passes`."""
        count = self._layout.grad_accumulation
        parts = zip(inputs.chunk(count), targets.chunk(count), strict=True)
        return torch.stack([self._loss(self._module(x), target) for x, target in parts]).mean()


class Pipelined:
    """Micro-batches through a pipeline's stages, in the order of its schedule."""

    def __init__(
        self, build: Callable[[Loss], Schedule], loss: Loss, scale: LossScale, *, first: bool,
        last: bool,
    ) -> None:  # fmt: skip
        self._schedule = build(lambda output, targets: loss(output, targets) * scale.scale)
        self._scale = scale
        self._first, self._last = first, last

    def gradients(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """See `Passes`."""
        losses: list[Tensor] = []
        self._schedule.step(*self._given(inputs), return_outputs=False, **self._wanted(targets, losses))
        return self._mean(losses)

    @torch.no_grad()
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """See `Passes`."""
        losses: list[Tensor] = []
        self._schedule.eval(*self._given(inputs), return_outputs=False, **self._wanted(targets, losses))
        return self._mean(losses)

    def _given(self, inputs: Tensor) -> tuple[Tensor, ...]:
        return (inputs,) if self._first else ()

    def _wanted(self, targets: Tensor, losses: list[Tensor]) -> dict[str, Tensor | list[Tensor]]:
        return {"target": targets, "losses": losses} if self._last else {}

    def _mean(self, losses: list[Tensor]) -> Tensor | None:
        if not self._last:
            return None
        return torch.stack([loss.detach() for loss in losses]).mean() / self._scale.scale
