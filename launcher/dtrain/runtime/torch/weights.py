"""Initializes a model's weights, independent of the layout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from dtrain.runtime.torch.agreement import extremes

Initializer = Callable[[str, nn.Module], None]
"""Fills the tensors that a module itself owns. Gets the module's name in the whole model."""


class Materializer:
    """Gives meta tensors memory and values, one module at a time.

    Each module has its own generator, seeded by its name, so its weights depend neither on this
    rank's other modules nor on the order.
    """

    def __init__(self, device: torch.device, seed: int, initializer: Initializer | None) -> None:
        self.device = device
        self._seed = seed
        self._initializer = initializer
        self._shared: dict[int, nn.Parameter] = {}
        """Tied weights: the meta parameter's id, and its materialized parameter."""
        self._keep: list[Tensor] = []

    def __call__(self, name: str, module: nn.Module) -> None:
        """Materialize ``module`` and its submodules. ``name`` is its name in the whole model.

        Tensors that are not on meta only move to the device. Raises ValueError for a tensor that
        nothing initializes.
        """
        for inner, child in module.named_modules():
            self._one(".".join(filter(None, (name, inner))), child)
        module.to(self.device)

    def holders(self, model: nn.Module, parts: Iterable[str]) -> None:
        """Materialize and move the tensors that the modules around ``parts`` own themselves."""
        paths = {""}
        for part in parts:
            steps = part.split(".")
            paths |= {".".join(steps[:depth]) for depth in range(1, len(steps))}
        for path in sorted(paths):
            holder = model.get_submodule(path)
            self._one(path, holder)
            for parameter in holder.parameters(recurse=False):
                parameter.data = parameter.data.to(self.device)
            for key, buffer in holder._buffers.items():
                if buffer is not None:
                    holder._buffers[key] = buffer.to(self.device)

    def _one(self, name: str, module: nn.Module) -> None:
        new = [
            key for key, tensor in _own(module) if tensor.is_meta and id(tensor) not in self._shared
        ]
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[key] = self._materialized(parameter)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = _undefined(buffer, self.device)
        if not new:
            return
        untouched = {key: (tensor, tensor._version) for key, tensor in _own(module) if key in new}
        with forked(self.device), torch.no_grad():
            torch.manual_seed(seed_of(str(self._seed), name))
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
            if self._initializer is not None:
                self._initializer(name, module)
        for key, tensor in _own(module):
            if key in new and _is_undefined(tensor, *untouched[key]):
                raise ValueError(
                    f"nothing initializes {name}.{key}: define reset_parameters() in"
                    f" {type(module).__name__}, or set it in the `init` given to parallelize()"
                )

    def _materialized(self, parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in self._shared:
            new = nn.Parameter(_undefined(parameter, self.device), parameter.requires_grad)
            self._shared[id(parameter)] = new
            # An id is valid only while its object lives.
            self._keep.append(parameter)
        return self._shared[id(parameter)]


def tied(model: nn.Module) -> dict[str, str]:
    """Further names of parameters that the model uses in several places, each with the parameter's
    first name."""
    first: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            ties[name] = first[id(parameter)]
    return ties


def restore_ties(model: nn.Module, ties: dict[str, str]) -> None:
    """Tie each parameter in ``ties`` to its first name again; splitting copies parameters."""
    for name, first in ties.items():
        module, _, key = name.rpartition(".")
        model.get_submodule(module)._parameters[key] = model.get_parameter(first)


def refuse_different_weights(model: nn.Module) -> None:
    """Raise ValueError unless every rank has built ``model`` with the same weights."""
    sums = [p.detach().double().sum() for p in model.parameters() if not p.is_meta]
    if not sums:
        return
    least, most = extremes(torch.stack(sums))
    if not torch.allclose(least, most, rtol=1e-9, atol=1e-9):
        raise ValueError(
            "the ranks have built the model with different weights: call torch.manual_seed with"
            ' the same seed on all ranks first, or build it under torch.device("meta")'
        )


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for tensors in (module._parameters, module._buffers):
        for key, tensor in tensors.items():
            if tensor is not None:
                yield key, tensor


def _undefined(like: Tensor, device: torch.device) -> Tensor:
    """Memory that shows whether anything has been written to it."""
    new = torch.empty_like(like, device=device, requires_grad=False)
    return new.fill_(torch.nan) if new.is_floating_point() else new.zero_()


def _is_undefined(tensor: Tensor, new: Tensor, version: int) -> bool:
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    # Integers and masks have no such value: they must have been written to.
    return tensor is new and tensor._version == version


def forked(device: torch.device) -> AbstractContextManager[None]:
    """What draws inside changes no number that is drawn after it, on the CPU and on ``device``."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def seed_of(seed: str, name: str) -> int:
    """A seed for ``name`` alone."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
