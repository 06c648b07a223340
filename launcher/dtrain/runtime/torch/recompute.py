"""Activation recomputation, block by block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_aten = torch.ops.aten
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def recompute(block: nn.Module, how: str) -> None:
    """Make ``block`` keep fewer activations for its backward pass, and recompute the rest.

    ``full`` keeps only the block's input. ``selective`` keeps the output of attention and of every
    second matrix product, as torchtitan does and `dtrain plan` assumes.
    """
    if how == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = _selective_contexts
    # Replace the method instead of wrapping the module, so that parameters keep their names.
    forward: Callable[..., Any] = block.forward
    block.forward = functools.partial(checkpoint, forward, **options)


def _selective_contexts() -> Any:
    products = {True: 0, False: 0}

    def policy(context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operation is _aten.mm.default:
            products[context.is_recompute] += 1
            keep = products[context.is_recompute] % 2 == 1
        else:
            keep = operation in _ATTENTION
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
