"""A mixture of experts, and expert parallelism: ranks that hold different experts exchange tokens
(GShard, arXiv 2006.16668)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dtrain.runtime.layout import Layout


class MixtureOfExperts(nn.Module):
    """Sends each token to the ``active`` experts that its router prefers, and adds up their outputs
    by the router's probabilities among them (Mixtral, arXiv 2401.04088, section 2.1).

    Takes and returns (..., ``width``). No token is dropped. ``experts`` are modules that map
    (tokens, ``width``) to the same shape.
    """

    def __init__(self, width: int, experts: Sequence[nn.Module], active: int) -> None:
        super().__init__()
        if not 1 <= active <= len(experts):
            raise ValueError(f"{active} active experts of {len(experts)}; use 1 to {len(experts)}")
        self.router = nn.Linear(width, len(experts), bias=False)
        self.experts = ExpertBank(experts)
        self.active = active
        self.count = len(experts)
        self._mesh: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        tokens = x.flatten(0, -2)
        chances, chosen = self.router(tokens).float().softmax(-1).topk(self.active)
        weights = chances / chances.sum(-1, keepdim=True)
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        counts = experts.new_zeros(self.count).index_add(0, experts, torch.ones_like(experts))
        outputs = self._run_experts(tokens[order // self.active], counts)
        # (tokens, active, width). A product with the probabilities saves one tensor of this size;
        # index_add would save two.
        restored = outputs[order.argsort()].view(*chosen.shape, -1)
        mixed: Tensor = weights.to(restored.dtype).unsqueeze(1) @ restored
        return mixed.to(tokens.dtype).view(x.shape)

    def keep_share(self, mesh: DeviceMesh) -> None:
        """Keep only this rank's experts, and exchange tokens with the other ranks of ``mesh``."""
        held = self.count // mesh.size()
        first = held * mesh.get_local_rank()
        for number in range(self.count):
            if not first <= number < first + held:
                delattr(self.experts, str(number))
        self._mesh = mesh

    def _run_experts(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """The experts' outputs for ``tokens``, which are ordered by expert. ``counts`` has the
        number of tokens of each expert."""
        if self._mesh is None:
            return torch.cat(self.experts(torch.split(tokens, sizes(counts))))
        group, ranks = self._mesh.get_group(), self._mesh.size()
        held = self.count // ranks
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        # Tokens arrive ordered by rank, then by expert.
        arrived = sizes(arriving)
        sent = [sum(part) for part in _groups(sizes(counts), held)]
        received = [sum(part) for part in _groups(arrived, held)]
        # Piece ``rank * held + expert`` has the tokens of one rank for one of our experts.
        pieces = torch.split(_exchanged(tokens, sent, received, group), arrived)
        outputs = self.experts([torch.cat(pieces[expert::held]) for expert in range(held)])
        parts = [
            torch.split(output, arrived[expert::held]) for expert, output in enumerate(outputs)
        ]
        back = torch.cat([part[rank] for rank in range(ranks) for part in parts])
        return _exchanged(back, received, sent, group)


class ExpertBank(nn.Module):
    """The experts that a rank holds, by their numbers in the whole model."""

    def __init__(self, experts: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, expert in enumerate(experts):
            self.add_module(str(number), expert)

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The output of each expert for its tokens."""
        # Experts without tokens run too: FSDP and DDP wait for the gradient of every parameter.
        return [expert(tokens) for expert, tokens in zip(self.children(), inputs, strict=True)]


@dataclass(frozen=True, slots=True)
class ExpertSplit:
    """Spreads the experts of each layer over the ranks of ``mesh["expert"]``. The dimensions
    ``replicate`` and ``shard`` are the ranks that hold the same experts."""

    mesh: DeviceMesh

    def refuse(self, model: nn.Module) -> None:
        """Raise ValueError if ``model`` has no experts, or the ranks do not divide them."""
        mixtures = [*_mixtures(model)]
        ranks = self.mesh["expert"].size()
        if not mixtures:
            raise ValueError(
                f"{type(model).__name__} has no experts for expert {ranks}: build them with"
                " dtrain.runtime.torch.MixtureOfExperts, or use a layout with expert 1"
            )
        for mixture in mixtures:
            if mixture.count % ranks:
                raise ValueError(f"expert {ranks} does not divide the {mixture.count} experts")

    def __call__(self, block: nn.Module) -> None:
        """Keep this rank's share of the experts in ``block``."""
        for mixture in _mixtures(block):
            mixture.keep_share(self.mesh["expert"])


def banks(module: nn.Module) -> dict[str, ExpertBank]:
    """The experts inside ``module``, by name."""
    return {name: inner for name, inner in module.named_modules() if isinstance(inner, ExpertBank)}


def mesh_sizes_of_experts(layout: Layout) -> tuple[int, int]:
    """The number of copies of each expert's states, and the number of ranks that share one copy."""
    shards = layout.expert_shards
    return layout.copies // layout.expert // shards, shards


def sizes(counts: Tensor) -> list[int]:
    """``counts`` as numbers; waits for a GPU."""
    found: list[int] = counts.tolist()
    return found


def _mixtures(module: nn.Module) -> Iterator[MixtureOfExperts]:
    return (inner for inner in module.modules() if isinstance(inner, MixtureOfExperts))


def _groups(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


class _Exchange(torch.autograd.Function):
    """Sends tokens to the ranks of a group, and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.back = received, sent, group
        return _exchange(tokens, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient, *ctx.back), None, None, None


def _exchange(
    tokens: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    output = tokens.new_empty(sum(received), tokens.shape[-1])
    dist.all_to_all_single(output, tokens.contiguous(), received, sent, group)
    return output


def _exchanged(
    tokens: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    """The tokens that the ranks send here, ordered by rank. ``sent`` and ``received`` are the
    numbers of tokens for and from each rank."""
    found: Tensor = _Exchange.apply(tokens, sent, received, group)  # type: ignore[no-untyped-call]
    return found
