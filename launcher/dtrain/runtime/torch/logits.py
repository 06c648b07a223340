"""Logits and loss split over the vocabulary, so that no tensor rank holds all logits of a token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from dtrain.runtime.torch.anatomy import Anatomy
from dtrain.runtime.torch.passes import Loss
from dtrain.runtime.torch.pipeline import returns_its_output_layer

_SEQUENCE = 8


def output_layer(model: nn.Module, anatomy: Anatomy, ranks: int) -> str:
    """The name of the layer that computes the logits, or ``""`` if they cannot stay split over
    ``ranks``: the model must return the output of this layer unchanged."""
    name = anatomy.after[-1] if anatomy.after else ""
    output = model.get_submodule(name) if name else None
    if not isinstance(output, nn.Linear) or output.out_features % ranks:
        return ""
    return name if returns_its_output_layer(model, anatomy) else ""


def same_when_split(loss: Loss, vocabulary: int, mesh: DeviceMesh, device: torch.device) -> bool:
    """Whether ``loss`` has the same value and gradient for whole and for split random logits. All
    tensor ranks call it."""
    same = torch.Generator(device).manual_seed(0)
    whole = torch.randn(2, _SEQUENCE, vocabulary, device=device, generator=same)
    targets = torch.randint(vocabulary, (2, _SEQUENCE), device=device, generator=same)
    share = whole.chunk(mesh.size(), dim=-1)[mesh.get_local_rank()].clone()
    try:
        wanted, slope = _with_gradient(loss, whole, targets)
        with loss_parallel():
            found, part = _with_gradient(of_split_logits(loss, mesh), share, targets)
    except Exception:  # noqa: BLE001 - the user's code may raise anything for split tensors
        return False
    mine = slope.chunk(mesh.size(), dim=-1)[mesh.get_local_rank()]
    return torch.allclose(found, wanted, rtol=1e-4) and torch.allclose(part, mine, atol=1e-6)


def of_split_logits(loss: Loss, mesh: DeviceMesh) -> Loss:
    """``loss`` for a rank with only its shard of the vocabulary. Run it and the backward pass in
    `loss_parallel`."""

    def split(output: Tensor, targets: Tensor) -> Tensor:
        logits = DTensor.from_local(output, mesh, [Shard(-1)], run_check=False)
        found = loss(logits, targets)
        return found.full_tensor() if isinstance(found, DTensor) else found

    return split


@contextmanager
def within_split_logits(inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For `PreparedPasses` with a loss from `of_split_logits`."""
    with loss_parallel():
        yield inputs, targets


def _with_gradient(loss: Loss, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        found = loss(logits.requires_grad_(), targets)
        (gradient,) = torch.autograd.grad(found, logits)
    return found.detach(), gradient
