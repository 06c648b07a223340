"""A model under a layout: the methods that a training loop calls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtrain.runtime.layout import Layout
from dtrain.runtime.progress import steps
from dtrain.runtime.torch.dropout import Draws
from dtrain.runtime.torch.experts import banks
from dtrain.runtime.torch.passes import Passes
from dtrain.runtime.torch.precision import LossScale
from dtrain.runtime.torch.sharding import gather_no_more
from dtrain.runtime.torch.timing import StepTimer


class ParallelModel:
    """This rank's share of a model: all of it, or its stages of a pipeline."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        passes: Passes,
        layout: Layout,
        mesh: DeviceMesh,
        loss_scale: LossScale,
        timer: StepTimer,
        draws: Draws,
    ) -> None:
        self.parts = list(parts)
        """The model's modules, one for each stage on this rank. Parameters have their names from
        the whole model."""
        self.loss_scale = loss_scale
        self.draws = draws
        """The random numbers of each step."""
        self._passes = passes
        self._layout = layout
        self._mesh = mesh
        self._timer = timer
        self._expert_names = tuple(
            f"{name}." for part in parts for name in banks(part) if layout.expert > 1
        )
        """Prefixes of the names of parameters that not all data ranks hold."""
        self._clipped: Tensor | None = None
        """The gradient norm that `clip_gradients` computed in this step."""

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank optimizes."""
        return [parameter for _, parameter in self.named_parameters()]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters, or this rank's shards of them, by their names in the whole model."""
        for part in self.parts:
            yield from part.named_parameters()

    def gradients(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the gradients of the mean loss over a global batch, replacing earlier gradients.

        ``inputs`` and ``targets`` are this data rank's samples from `ParallelRun.batches`: their
        first dimension is micro_batch x grad_accumulation. Returns the mean loss over the global
        batch, the same on every rank, without waiting for a GPU.
        """
        self._check(inputs)
        self._clipped = None
        for parameter in self.parameters():
            parameter.grad = None
        with self._timer.passes(), self.draws.passes():
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
        """The Euclidean norm of all gradients of the model, over all ranks. Not finite if any
        gradient is not finite."""
        here = self._gradients_here()
        # The list is empty on a rank whose parameters are all frozen, but the other ranks wait.
        device = "cpu" if self._layout.offload else self._mesh.device_type
        norms = torch.stack(torch._foreach_norm(here)) if here else torch.zeros(0, device=device)
        # Several ranks hold each stage. A piece that more than one rank holds must count once.
        holders = dist.get_world_size() // self._layout.pipeline
        pieces = [
            _pieces(p.grad) * (self._layout.expert if self._of_expert(name) else 1)
            for name, p in self.named_parameters()
            if p.grad is not None
        ]
        copies = torch.tensor([holders / count for count in pieces], device=norms.device)
        square = (norms.square() / copies).sum()
        with steps.waiting():
            dist.all_reduce(square)
        return square.sqrt()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale the gradients to a norm of at most ``max_norm``. Returns the norm before that."""
        norm = self._clipped = self.gradient_norm()
        # On this rank's shards: one call takes no DTensors of several meshes, as experts have.
        if here := self._gradients_here():
            torch._foreach_mul_(here, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(here[0].device))
        return norm

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Run ``optimizer``'s step. With fp16, all ranks skip a step whose gradients overflowed,
        and return False."""
        finite = True
        if self.loss_scale.enabled:
            norm = self.gradient_norm() if self._clipped is None else self._clipped
            finite = bool(norm.isfinite())
        if finite:
            optimizer.step()
        self.loss_scale.update(finite)
        self._timer.end_step()
        return finite

    def _check(self, inputs: Tensor) -> None:
        layout = self._layout
        copies = self._mesh["replicate"].size() * self._mesh["shard"].size()
        here = layout.global_batch * layout.context // copies
        if len(inputs) != here:
            raise ValueError(
                f"this data rank's part of a global batch of {layout.global_batch} is {here}"
                f" samples, not {len(inputs)}"
            )
        if layout.context > 1 and inputs.shape[1] % (2 * layout.context):
            raise ValueError(
                f"context {layout.context} cannot split sequences of {inputs.shape[1]} into two"
                f" chunks for each rank; use a multiple of {2 * layout.context}"
            )
        if layout.sequence_parallel and inputs.shape[1] // layout.context % layout.tensor:
            raise ValueError(
                f"sequence_parallel cannot split sequences of {inputs.shape[1]} over"
                f" {layout.product(layout.split_by(('tensor', 'context')))}; use a multiple"
            )

    def _settle_gradients(self) -> None:
        """Sum gradients that tensor ranks hold in parts, and remove the loss scale."""
        for name, parameter in self.named_parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
                # Without FSDP, the gradient of a norm must still be summed over the tensor ranks.
                parameter.grad = gradient.redistribute(placements=parameter.placements)
            if self._of_expert(name) and parameter.grad is not None:
                # It sums over the tokens of all expert ranks, but FSDP has averaged only over the
                # ranks that hold this expert.
                parameter.grad.div_(self._layout.expert)
            if self.loss_scale.enabled and parameter.grad is not None:
                parameter.grad.div_(self.loss_scale.scale)

    def _gradients_here(self) -> list[Tensor]:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        return [g.to_local() if isinstance(g, DTensor) else g for g in gradients]

    def _of_expert(self, name: str) -> bool:
        return bool(self._expert_names) and name.startswith(self._expert_names)

    def _mean_over_ranks(self, loss: Tensor | None) -> Tensor:
        device = torch.device(self._mesh.device_type)
        total = torch.zeros((), device=device) if loss is None else loss.detach().float().clone()
        with steps.waiting():
            dist.all_reduce(total)
        # All tensor ranks at the last pipeline stage have the loss of their data rank.
        return total / (dist.get_world_size() // self._layout.pipeline)


def _pieces(tensor: Tensor) -> int:
    """The number of different pieces into which the ranks have split ``tensor``."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(
        mesh.size(dimension)
        for dimension, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    )
