"""Less memory or time for each block: recomputed or offloaded activations, and compilation."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
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


def offload_activations(block: nn.Module, device: torch.device) -> None:
    """Make ``block`` keep its activations in host memory until its backward pass.

    Parameters stay, and so do split tensors (DTensor).
    """
    forward: Callable[..., Any] = block.forward

    def offloaded(*args: Any, **kwargs: Any) -> Any:
        # FSDP gathers parameters into new storages for each pass.
        parameters = {
            p.untyped_storage().data_ptr() for p in block.parameters() if not isinstance(p, DTensor)
        }

        def pack(tensor: Tensor) -> Tensor:
            stays = isinstance(tensor, DTensor | nn.Parameter)
            if stays or tensor.untyped_storage().data_ptr() in parameters:
                return tensor
            return to_host(tensor, device)

        def unpack(kept: Tensor) -> Tensor:
            return from_host(kept, device)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    block.forward = offloaded


def to_host(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of ``tensor`` in the memory of the host of ``device``."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=device.type == "cuda")
    return host.copy_(tensor)


def from_host(kept: Tensor, device: torch.device) -> Tensor:
    """``kept`` on ``device``."""
    return kept if kept.device == device else kept.to(device, non_blocking=True)


def compiled(block: nn.Module) -> None:
    """Compile the computation of ``block``. FSDP's hooks stay outside. Raises RuntimeError if
    another user could change the compiled code."""
    _check_cache()
    block.forward = torch.compile(block.forward)


@functools.cache
def _check_cache() -> None:
    """torch stores compiled code below /tmp under a name that others can guess, and runs what it
    finds there."""
    # Slow to import. Its module is another one in older versions of torch.
    from torch._inductor.runtime.runtime_utils import cache_dir  # type: ignore[attr-defined]

    before = os.umask(0o077)
    try:
        folder = Path(cache_dir())  # creates it
    finally:
        os.umask(before)
    owners = {folder.lstat().st_uid, folder.stat().st_uid}
    if owners - {0, os.geteuid()} or folder.stat().st_mode & stat.S_IWOTH:
        raise RuntimeError(
            f"another user can change {folder}, and torch runs the compiled code in it: set"
            " TORCHINDUCTOR_CACHE_DIR to a folder of your own (job.env)"
        )


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
