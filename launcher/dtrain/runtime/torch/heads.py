"""Whether a block's attention still computes the same with only a share of its heads."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone gives it
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

HINT = "let the model split them as view(batch, sequence, -1, head_dim)"


class _HeadSizes(TorchFunctionMode):
    """Notes the size of the heads that attend."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(
        self,
        function: Any,
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is F.scaled_dot_product_attention:
            query: Tensor = args[0] if args else (kwargs or {})["query"]
            self.sizes.append(query.shape[-1])
        return function(*args, **(kwargs or {}))


def refuse_counted_heads(
    name: str, block: nn.Module, ranks: int, column: Collection[str], row: Collection[str]
) -> None:
    """Raise ValueError if ``block``, with each of ``ranks`` holding its share of the Linear
    modules named in ``column`` and ``row``, fails or attends with heads of another size.

    A model that splits its features into a fixed number of heads would do the latter, and train
    wrongly without a word. Tried on meta tensors, where the block takes the stream alone.
    """
    trial = copy.deepcopy(block).to("meta")
    linears = {path: m for path, m in trial.named_modules() if isinstance(m, nn.Linear)}
    columns = [path for path in linears if path.rpartition(".")[2] in column]
    if not columns:
        return
    stream = torch.zeros(1, 8 * ranks, linears[columns[0]].in_features, device="meta")
    try:
        whole = _head_sizes(trial, stream)
    except (RuntimeError, TypeError, ValueError):
        # It needs more than the stream: what fails will say so at the first step.
        return
    for path, linear in linears.items():
        kind = path.rpartition(".")[2]
        inputs = linear.in_features // (ranks if kind in row else 1)
        outputs = linear.out_features // (ranks if kind in column else 1)
        bias = linear.bias is not None
        share = nn.Linear(inputs, outputs, bias, device="meta", dtype=linear.weight.dtype)
        trial.set_submodule(path, share)
    try:
        split = _head_sizes(trial, stream)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{name} fails with a share of its heads on each of {ranks} tensor ranks ({error}):"
            f" {HINT}"
        ) from error
    if split != whole:
        raise ValueError(
            f"with tensor {ranks}, {name} would attend with heads of {split[0]} features instead"
            f" of {whole[0]}: {HINT}"
        )


def _head_sizes(block: nn.Module, stream: Tensor) -> list[int]:
    noted = _HeadSizes()
    with noted, torch.no_grad():
        block(stream.to(next(block.parameters()).dtype))
    return noted.sizes
