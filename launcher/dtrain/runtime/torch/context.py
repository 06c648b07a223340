"""Context parallelism: each rank computes its share of every sequence.

A share is one chunk from the front of the sequence and one from its back, so that causal attention
costs every rank the same. Attention gathers the keys and values of the whole sequence for its share
of the queries (Llama 3, arXiv 2407.21783, section 3.3.2). PyTorch's own `context_parallel` gathers
them too, but it is a prototype without kernels for the CPU, so nothing could test it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone gives it
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.overrides import TorchFunctionMode

from dtrain.runtime.torch.anatomy import Anatomy
from dtrain.runtime.torch.heads import first_output, same_result, with_random_weights
from dtrain.runtime.torch.pipeline import returns_its_output_layer
from dtrain.runtime.torch.weights import Materializer

_current: ContextVar[SequenceShare | None] = ContextVar("share", default=None)
"""The share that the running block computes."""
_AROUND = (nn.Embedding, nn.Linear, nn.Dropout, nn.Identity)


def positions(length: int, device: torch.device | None = None) -> Tensor:
    """The positions of a block's ``length`` tokens in their sequences: 0, 1, 2, …, or those of this
    rank's share under context parallelism. Use them for rotary angles."""
    share = _current.get()
    if share is None:
        return torch.arange(length, device=device)
    return share.positions(length, device)


@dataclass(frozen=True, slots=True)
class SequenceShare:
    """The share of every sequence that one rank of ``mesh`` computes."""

    mesh: DeviceMesh

    @property
    def _chunks(self) -> tuple[int, int]:
        """The two chunks of this rank, of twice as many as there are ranks."""
        rank = self.mesh.get_local_rank()
        return rank, 2 * self.mesh.size() - 1 - rank

    def of(self, whole: Tensor, dimension: int = 1) -> Tensor:
        """This rank's share of ``whole``."""
        chunks = whole.chunk(2 * self.mesh.size(), dimension)
        return torch.cat([chunks[number] for number in self._chunks], dimension)

    def positions(self, length: int, device: torch.device | None) -> Tensor:
        """The positions of the ``length`` tokens in this rank's share."""
        return self.of(torch.arange(length * self.mesh.size(), device=device), 0)

    def masks(self, length: int) -> list[CausalBias]:
        """The masks of this rank's two chunks of a sequence of ``length``."""
        size = length // (2 * self.mesh.size())
        return [_causal(size, (number + 1) * size) for number in self._chunks]

    def gathered(self, mine: Tensor) -> Tensor:
        """The whole of (batch, heads, sequence, features), from the shares of all ranks."""
        shared = DTensor.from_local(mine, self.mesh, [Shard(2)], run_check=False)
        whole = shared.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        chunks = whole.chunk(2 * self.mesh.size(), 2)
        return torch.cat((*chunks[::2], *chunks[1::2][::-1]), 2)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """`scaled_dot_product_attention` of this rank's queries to the whole sequence.

        Raises ValueError for a mask of the caller's own.
        """
        if attn_mask is not None:
            raise ValueError("context parallelism supports causal attention, not other masks")
        keys, values = self.gathered(key), self.gathered(value)
        if not is_causal:
            return F.scaled_dot_product_attention(
                query, keys, values, dropout_p=dropout_p, **options
            )
        masks = self.masks(query.shape[2] * self.mesh.size())
        outputs = [
            F.scaled_dot_product_attention(
                part,
                keys[:, :, : mask.seq_len_kv],
                values[:, :, : mask.seq_len_kv],
                attn_mask=mask,
                dropout_p=dropout_p,
                **options,
            )
            for mask, part in zip(masks, query.chunk(2, 2), strict=True)
        ]
        # In the memory order of one call's output, so that joining the heads copies nothing.
        return torch.cat([part.transpose(1, 2) for part in outputs], 1).transpose(1, 2)

    @contextmanager
    def active(self) -> Iterator[None]:
        """While it is open, this thread's attention and `positions` are those of the share."""
        token = _current.set(self)
        try:
            with _ShareAttention(self):
                yield
        finally:
            _current.reset(token)

    @contextmanager
    def prepared(self, inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For `PreparedPasses` over this rank's share of whole sequences."""
        self.masks(inputs.shape[1])
        yield self.of(inputs), self.of(targets)

    def block(self, block: nn.Module) -> None:
        """Make ``block`` compute this rank's share."""
        # Replace the method instead of wrapping the module, so that parameters keep their names.
        forward: Callable[..., Any] = block.forward

        @wraps(forward)
        def of_share(*args: Any, **kwargs: Any) -> Any:
            # Here, and not around the whole pass: recomputation runs the block in another thread.
            with self.active():
                return forward(*args, **kwargs)

        block.forward = of_share

    def refuse(self, model: nn.Module, anatomy: Anatomy, materialize: Materializer) -> None:
        """Raise ValueError if the ranks' shares would compute something different from the whole.

        Runs each kind of block with random weights on a short sequence: whole, and on the share.
        ``materialize`` fills meta buffers. All ranks of the mesh call it.
        """
        name = type(model).__name__
        if not returns_its_output_layer(model, anatomy):
            raise ValueError(
                f"{name}.forward() computes between its modules, and context parallelism cannot"
                " test that: move positions and scales into the blocks, or use context 1"
            )
        for path in anatomy.around:
            part = model.get_submodule(path)
            if any(True for _ in part.parameters()) and not (
                isinstance(part, _AROUND) or "Norm" in type(part).__name__
            ):
                raise ValueError(
                    f"context parallelism cannot split the input of {path}"
                    f" ({type(part).__name__}): it supports Linear, Embedding and norms around the"
                    " blocks; use a layout with context 1"
                )
        distinct = {str(model.get_submodule(path)): path for path in reversed(anatomy.blocks)}
        for path in distinct.values():
            self._refuse_block(path, model.get_submodule(path), materialize)

    def _refuse_block(self, name: str, block: nn.Module, materialize: Materializer) -> None:
        trial = with_random_weights(name, block, materialize)
        width = next(block.parameters()).shape[-1]
        same = torch.Generator(materialize.device).manual_seed(0)
        length = 4 * self.mesh.size()
        stream = torch.randn(1, length, width, device=materialize.device, generator=same)
        try:
            with torch.no_grad():
                whole = first_output(trial(stream.clone()))
                with self.active():
                    mine = first_output(trial(self.of(stream)))
        except Exception as error:
            raise ValueError(
                f"cannot test {name} for context parallelism with the residual stream as its only"
                f" input ({type(error).__name__}: {error}): let the block compute other inputs"
                " itself, such as rotary angles, or use a layout with context 1"
            ) from error
        if not same_result(mine, self.of(whole)):
            raise ValueError(
                f"with context {self.mesh.size()}, {name} computes a different result on a share of"
                " a sequence: take positions from dtrain.runtime.torch.positions(), and attention"
                " from F.scaled_dot_product_attention"
            )


class _ShareAttention(TorchFunctionMode):
    """Replaces attention by that of a share."""

    def __init__(self, share: SequenceShare) -> None:
        super().__init__()
        self._share = share

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._share.attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@lru_cache
def _causal(queries: int, keys: int) -> CausalBias:
    """The mask of the last ``queries`` of ``keys`` tokens. Cached, because PyTorch cannot create
    it while it recomputes selectively."""
    return causal_lower_right(queries, keys)
