"""A model under a layout: what a training loop calls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtrain.runtime.layout import Layout
from dtrain.runtime.torch.passes import Passes
from dtrain.runtime.torch.precision import LossScale
from dtrain.runtime.torch.sharding import gather_no_more


class ParallelModel:
    """This rank's share of a model: all of it, or its stages of a pipeline."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        passes: Passes,
        layout: Layout,
        mesh: DeviceMesh,
        loss_scale: LossScale,
    ) -> None:
        self.parts = list(parts)
        """The model's modules, one for each stage that this rank holds. Parameters have the names
        that they have in the whole model."""
        self.loss_scale = loss_scale
        self._passes = passes
        self._layout = layout
        self._mesh = mesh
        self._clipped: Tensor | None = None
        """The norm of the gradients that `clip_gradients` has found in this step."""

    def parameters(self) -> list[nn.Parameter]:
        """What this rank optimizes."""
        return [parameter for _, parameter in self.named_parameters()]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters, or this rank's shards of them, by their names in the whole model."""
        for part in self.parts:
            yield from part.named_parameters()

    def gradients(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Work out the gradients of the mean loss over a global batch, from scratch.

        ``inputs`` and ``targets`` are this data rank's samples, as `Run.batches` gives them: their
        first dimension is micro_batch x grad_accumulation. Returns the mean loss over the global
        batch, the same on every rank, without waiting for a GPU.
        """
        self._check(inputs)
        self._clipped = None
        for parameter in self.parameters():
            parameter.grad = None
        loss = self._passes.gradients(inputs, targets)
        self._settle_gradients()
        return self._mean_over_ranks(loss)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over a global batch of held-out samples, the same on every rank."""
        self._check(inputs)
        for part in self.parts:
            part.eval()
        loss = self._passes.loss(inputs, targets)
        for part in self.parts:
            part.train()
            gather_no_more(part)
        return self._mean_over_ranks(loss)

    def gradient_norm(self) -> Tensor:
        """The Euclidean norm of all gradients of the model, over all ranks; not finite where a
        gradient is not."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        here = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        # Of a rank whose parameters are all frozen the list is empty, and the others still wait.
        device = "cpu" if self._layout.offload else self._mesh.device_type
        norms = torch.stack(torch._foreach_norm(here)) if here else torch.zeros(0, device=device)
        # Each stage is on this many ranks; those that hold the same piece must count it once.
        holders = dist.get_world_size() // self._layout.pipeline
        copies = torch.tensor([holders / _pieces(g) for g in gradients], device=norms.device)
        square = (norms.square() / copies).sum()
        dist.all_reduce(square)
        return square.sqrt()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale the gradients down to a norm of at most ``max_norm``; returns what it was."""
        norm = self._clipped = self.gradient_norm()
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Let ``optimizer`` take its step. With fp16, a step whose gradients overflowed is left
        out on all ranks, and False returned."""
        finite = True
        if self.loss_scale.enabled:
            norm = self.gradient_norm() if self._clipped is None else self._clipped
            finite = bool(norm.isfinite())
        if finite:
            optimizer.step()
        self.loss_scale.update(finite)
        return finite

    def _check(self, inputs: Tensor) -> None:
        layout = self._layout
        here = layout.global_batch // self._mesh["replicate"].size() // self._mesh["shard"].size()
        if len(inputs) != here:
            raise ValueError(
                f"this data rank's part of a global batch of {layout.global_batch} is {here}"
                f" samples, not {len(inputs)}"
            )
        if layout.sequence_parallel and inputs.shape[1] % layout.tensor:
            raise ValueError(
                f"sequence_parallel cannot split sequences of {inputs.shape[1]} over tensor"
                f" {layout.tensor}; use a multiple"
            )

    def _settle_gradients(self) -> None:
        """Add up what tensor ranks hold parts of, and take the loss scale off."""
        for parameter in self.parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
                # Without FSDP a norm's gradient is still a sum over the tensor ranks to be made.
                parameter.grad = gradient.redistribute(placements=parameter.placements)
            if self.loss_scale.enabled and parameter.grad is not None:
                parameter.grad.div_(self.loss_scale.scale)

    def _mean_over_ranks(self, loss: Tensor | None) -> Tensor:
        device = torch.device(self._mesh.device_type)
        total = torch.zeros((), device=device) if loss is None else loss.detach().float().clone()
        dist.all_reduce(total)
        # Each data rank's loss is found by all of its tensor ranks, at one end of its pipeline.
        return total / (dist.get_world_size() // self._layout.pipeline)


def _pieces(tensor: Tensor) -> int:
    """Into how many different pieces the ranks have split ``tensor``."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(
        mesh.size(dimension)
        for dimension, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    )
