"""Tests whether a block computes the same result if each rank holds only a share of it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.runtime.torch.weights import Materializer, forked

HINT = "let the model split them as view(batch, sequence, -1, head_dim)"
_SEQUENCE = 8


def refuse_what_shares_change(
    name: str,
    block: nn.Module,
    ranks: int,
    column: Collection[str],
    row: Collection[str],
    materialize: Materializer,
) -> None:
    """Raise ValueError unless the shares of ``block`` on ``ranks`` ranks add up to the whole block.

    ``column`` and ``row`` name the Linear modules to split. A model that splits its features into a
    fixed number of heads would silently train a different model, however it implements attention.
    So the block runs with random weights: first whole, then share by share. In the second runs,
    each row-split layer returns its output from the whole block. The row-split outputs of the
    shares must add up to those of the whole block. ``materialize`` fills buffers that are on meta.
    """
    trial = with_random_weights(name, block, materialize)
    linears = {path: m for path, m in trial.named_modules() if isinstance(m, nn.Linear)}
    columns = [linear for path, linear in linears.items() if path.rpartition(".")[2] in column]
    rows = {path: m for path, m in linears.items() if path.rpartition(".")[2] in row}
    if not columns:
        return
    device = columns[0].weight.device
    same = torch.Generator(device).manual_seed(0)
    stream = torch.randn(1, _SEQUENCE, columns[0].in_features, device=device, generator=same)
    whole = _Record(rows)
    try:
        output = whole.run(trial, stream)
    except Exception as error:
        raise ValueError(
            f"cannot test {name} for tensor parallelism with the residual stream as its only input"
            f" ({_message(error)}): let the block compute other inputs itself, such as masks and"
            " rotary angles, or use a layout with tensor 1"
        ) from error
    # The bias of a row-split layer is added once, not once per share.
    sums = [_bias(rows[path], wanted) for path, wanted in whole.given]
    shares = [_shares(linear, ranks, 0) for linear in columns]
    shares += [_shares(linear, ranks, 1) for linear in rows.values()]
    for rank in range(ranks):
        for linear, held in zip((*columns, *rows.values()), shares, strict=True):
            linear.weight, linear.bias = held[rank]
        share = _Record(rows, iter(whole.given))
        try:
            shared_output = share.run(trial, stream)
        except Exception as error:
            raise ValueError(
                f"{name} fails with a share of its heads on each of {ranks} tensor ranks"
                f" ({_message(error)}): {HINT}"
            ) from error
        same_calls = [path for path, _ in share.given] == [path for path, _ in whole.given]
        if not same_calls or not same_result(shared_output, output):
            raise ValueError(
                f"with tensor {ranks}, {name} computes a different result on a share of its"
                f" heads: {HINT}"
            )
        sums = [total + part for total, (_, part) in zip(sums, share.given, strict=True)]
    for total, (path, wanted) in zip(sums, whole.given, strict=True):
        if not same_result(total, wanted):
            raise ValueError(
                f"with tensor {ranks}, {name} would train a different model: the ranks' inputs to"
                f" {path} do not add up to the input in one process. If the number of heads is"
                f" fixed, {HINT}"
            )


class _Record:
    """Runs a block and records the outputs of its row-split layers, in call order. Given the record
    of another run, the layers return that run's outputs instead."""

    def __init__(
        self, rows: Mapping[str, nn.Linear], instead: Iterator[tuple[str, Tensor]] | None = None
    ) -> None:
        self.given: list[tuple[str, Tensor]] = []
        self._layers = rows
        self._instead = instead

    def run(self, block: nn.Module, stream: Tensor) -> Tensor:
        handles = [
            layer.register_forward_hook(
                lambda _layer, _inputs, output, path=path: self._note(path, output)
            )
            for path, layer in self._layers.items()
        ]
        try:
            with torch.no_grad():
                output = first_output(block(stream.clone()))
        finally:
            for handle in handles:
                handle.remove()
        if not output.isfinite().all():
            raise ValueError("with random weights, its output is not finite")
        return output

    def _note(self, path: str, output: Tensor) -> Tensor:
        self.given.append((path, output))
        return output if self._instead is None else next(self._instead, (path, output))[1]


def with_random_weights(name: str, block: nn.Module, materialize: Materializer) -> nn.Module:
    """A float32 copy of ``block`` with random weights. No weight is copied to create it."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty(p.shape, device=materialize.device), requires_grad=False)
        for p in block.parameters()
    }
    trial = copy.deepcopy(block, memo).eval()
    with forked(materialize.device), torch.no_grad():
        torch.manual_seed(0)
        materialize(name, trial.float())
        for module in trial.modules():
            for parameter in module.parameters(recurse=False):
                # Queries and keys of unit variance, so that attention prefers some positions.
                linear = isinstance(module, nn.Linear) and parameter.dim() == 2
                mean, std = (0.0, parameter.shape[-1] ** -0.5) if linear else (1.0, 0.1)
                parameter.normal_(mean, std)
    return trial


def _shares(linear: nn.Linear, ranks: int, dimension: int) -> list[tuple[Any, Any]]:
    """Weight and bias of each rank. The bias of a row-split layer belongs to no rank."""
    weights = linear.weight.detach().chunk(ranks, dimension)
    biases: Sequence[Tensor | None] = [None] * ranks
    if linear.bias is not None and dimension == 0:
        biases = linear.bias.detach().chunk(ranks)
    return [
        (
            nn.Parameter(weight, requires_grad=False),
            None if bias is None else nn.Parameter(bias, requires_grad=False),
        )
        for weight, bias in zip(weights, biases, strict=True)
    ]


def _bias(linear: nn.Linear, output: Tensor) -> Tensor:
    return torch.zeros_like(output) if linear.bias is None else linear.bias.expand_as(output)


def first_output(output: Any) -> Tensor:
    """The residual stream that a block returns, alone or before other values."""
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def same_result(found: Tensor, wanted: Tensor) -> bool:
    """Whether two outputs of a block differ only by rounding."""
    # Tolerates rounding of float32 sums, TF32 included. A different model is far off.
    return found.shape == wanted.shape and bool(
        (found - wanted).abs().max() <= 1e-2 * wanted.abs().max()
    )


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
