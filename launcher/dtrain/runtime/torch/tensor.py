"""Tensor parallelism of a plain transformer, with optional sequence parallelism (arXiv 2205.05198).

It follows Megatron-LM (arXiv 1909.08053, section 3): layers that open attention and MLP are split
by columns, layers that close them by rows, the embedding by rows of its vocabulary, the output
layer by columns. The name of a Linear module determines how it is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from dtrain.runtime.torch.dropout import OwnDraws, draws
from dtrain.runtime.torch.experts import banks
from dtrain.runtime.torch.heads import refuse_what_shares_change
from dtrain.runtime.torch.weights import Materializer

_ATTENTION = {"q_proj", "k_proj", "v_proj", "wq", "wk", "wv", "query", "key", "value"}
_MLP = {"gate_proj", "up_proj", "w1", "w3", "fc1", "gate", "up"}
COLUMN = frozenset(_ATTENTION | _MLP)
"""Names of Linear modules that open attention or an MLP."""
ROW = frozenset({"o_proj", "out_proj", "wo", "out", "down_proj", "w2", "fc2", "down"})
"""Names of Linear modules that close them."""
_FUSED = frozenset(
    ["qkv", "qkv_proj", "wqkv", "c_attn", "in_proj", "query_key_value", "gate_up_proj", "w13"]
)


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """Splits a model's parts over the ranks of ``mesh``, one part at a time.

    Between parts the residual stream is a plain tensor: (batch, sequence, hidden), with only this
    rank's share of the sequence under ``sequence`` parallelism.
    """

    mesh: DeviceMesh
    sequence: bool
    column: frozenset[str] = COLUMN
    row: frozenset[str] = ROW
    output: str = ""
    """The output layer whose logits stay split over the vocabulary; ``""`` gathers them."""
    own: OwnDraws | None = None
    """For blocks that draw random numbers."""

    @property
    def _stream(self) -> Placement:
        # Counted from the end: learned positions have the shape (sequence, hidden).
        return Shard(-2) if self.sequence else Replicate()

    def refuse(self, blocks: Mapping[str, nn.Module], materialize: Materializer) -> None:
        """Raise ValueError for a part of a block that cannot be split, whose size the ranks do not
        divide, or whose share computes something different. ``materialize`` fills meta buffers.

        Checks the whole model on every rank, so that ranks of other stages do not wait for a failed
        rank.
        """
        for name, block in blocks.items():
            self._check_block(name, block)
        for name, block in _distinct(blocks).items():
            refuse_what_shares_change(
                name, block, self.mesh.size(), self.column, self.row, materialize
            )

    def with_draws(self, blocks: Mapping[str, nn.Module], materialize: Materializer) -> TensorSplit:
        """This split, with random numbers of each rank's own if one of the blocks, which
        passed `refuse`, draws some."""
        for name, block in _distinct(blocks).items():
            columns = (m for path, m in _owners(block) if path.rpartition(".")[2] in self.column)
            first = next(columns, None)
            if isinstance(first, nn.Linear) and draws(name, block, first.in_features, materialize):
                own = OwnDraws(self.mesh.get_local_rank(), materialize.device)
                return replace(self, own=own)
        return self

    def block(self, block: nn.Module) -> None:
        """Split a block that passed `refuse`."""
        opened: set[str] = set()
        for inner, module in _owners(block):
            path, _, kind = inner.rpartition(".")
            if kind in self.row:
                self._apply(module, RowwiseParallel(output_layouts=self._stream))
            elif kind in self.column and not path:
                self._apply(module, ColwiseParallel(input_layouts=self._stream))
            elif kind in self.column:
                self._apply(module, ColwiseParallel(input_layouts=Replicate()))
                opened.add(path)
        for path in opened:
            # One gather for all columns that share this input, instead of one for each.
            block.get_submodule(path).register_forward_pre_hook(self._enter, with_kwargs=True)
        for inner, module in _owners(block):
            if _is_norm(module):
                parent = inner.rpartition(".")[0]
                inside = any(parent == path or parent.startswith(f"{path}.") for path in opened)
                # A norm of queries or keys sees only this rank's heads: a shard of a dimension that
                # the norm does not sum over.
                _distribute_norm(module, self.mesh, Shard(0) if inside else self._stream)
        if self.own is not None:
            self._draw(block, self.own)

    def _draw(self, block: nn.Module, own: OwnDraws) -> None:
        if self.sequence:
            own.around(block)
            return
        for inner, module in _owners(block):
            kind = inner.rpartition(".")[2]
            if kind in self.column:
                module.register_forward_hook(own.enter)
            elif kind in self.row:
                module.register_forward_pre_hook(own.leave)
        own.within(block)

    def around(self, name: str, part: nn.Module) -> None:
        """Split the parts around the blocks: embedding, norm and output layer."""
        if self.own is not None and self.sequence and not _owners(part):
            self.own.around(part)
        for inner, module in _owners(part):
            full = f"{name}.{inner}" if inner else name
            if isinstance(module, nn.Embedding):
                self._divides(full, "num_embeddings", module.num_embeddings)
                self._apply(
                    module, RowwiseParallel(input_layouts=Replicate(), output_layouts=self._stream)
                )
                # A block may add to its input in place. On a view, that would remove the hook with
                # which FSDP gathers the embedding again.
                module.register_forward_hook(lambda _module, _inputs, output: output.clone())
            elif isinstance(module, nn.Linear):
                self._divides(full, "out_features", module.out_features)
                logits = Shard(-1) if full == self.output else Replicate()
                self._apply(
                    module, ColwiseParallel(input_layouts=self._stream, output_layouts=logits)
                )
            elif _is_norm(module):
                _distribute_norm(module, self.mesh, self._stream)
            else:
                raise ValueError(_no_place(full, inner, module))

    def _check_block(self, name: str, block: nn.Module) -> None:
        if banks(block):
            raise ValueError(
                f"tensor parallelism does not split the experts of {name}; use a layout with tensor"
                " 1, and expert to spread them"
            )
        for inner, module in block.named_modules():
            if inner and isinstance(module, nn.ModuleList):
                raise ValueError(
                    f"tensor parallelism cannot tell how {name} uses its list {inner!r}, such as a"
                    " router's experts; use a layout with tensor 1"
                )
        for inner, module in _owners(block):
            full = f"{name}.{inner}" if inner else name
            path, _, kind = inner.rpartition(".")
            if isinstance(module, nn.Linear) and kind in self.column:
                self._divides(full, "out_features", module.out_features)
                self._divides_heads(full, block.get_submodule(path), module.out_features)
            elif isinstance(module, nn.Linear) and kind in self.row:
                self._divides(full, "in_features", module.in_features)
            elif not _is_norm(module):
                raise ValueError(_no_place(full, kind, module))

    def _divides_heads(self, name: str, attention: nn.Module, features: int) -> None:
        size = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
        ranks = self.mesh.size()
        if isinstance(size, int) and features // ranks % size:
            raise ValueError(
                f"tensor {ranks} does not divide the {features // size} heads of {name}"
            )

    def _enter(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._whole(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: self._whole(kwargs[first])}

    def _whole(self, stream: Tensor) -> DTensor:
        given = DTensor.from_local(stream, self.mesh, [self._stream], run_check=False)
        return given.redistribute(placements=[Replicate()])

    def _apply(self, module: nn.Module, style: ParallelStyle) -> None:
        # Every rank has created the same weights, so nothing is sent.
        parallelize_module(module, self.mesh, style, src_data_rank=None)

    def _divides(self, name: str, what: str, size: int) -> None:
        if size % self.mesh.size():
            raise ValueError(f"tensor {self.mesh.size()} does not divide {what} {size} of {name}")


def _distribute_norm(module: nn.Module, mesh: DeviceMesh, given: Placement) -> None:
    """Keep a norm's parameters whole, and sum their gradients over the ranks."""

    def replicate(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            whole = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
            setattr(module, key, nn.Parameter(whole, requires_grad=parameter.requires_grad))

    gets_dtensor = False

    def enter(_module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        nonlocal gets_dtensor
        first, *others = inputs
        gets_dtensor = isinstance(first, DTensor)
        if gets_dtensor:
            return inputs
        return (DTensor.from_local(first, mesh, [given], run_check=False), *others)

    def leave(_module: nn.Module, output: DTensor, _mesh: DeviceMesh) -> Tensor:
        """The output has the type of the input."""
        return output if gets_dtensor else output.to_local()

    # Its annotations say that hooks return nothing; its documentation matches this use.
    distribute_module(module, mesh, replicate, enter, leave)  # type: ignore[arg-type]


def _distinct(blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """One of equal blocks: for a large block, a test takes seconds."""
    first = {str(block): name for name, block in reversed([*blocks.items()])}
    return {name: blocks[name] for name in first.values()}


def _owners(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules with parameters of their own."""
    return [
        (name, inner)
        for name, inner in module.named_modules()
        if any(True for _ in inner.parameters(recurse=False))
    ]


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and "BatchNorm" not in type(module).__name__


def _no_place(name: str, kind: str, module: nn.Module) -> str:
    what = f"tensor parallelism cannot place {name} ({type(module).__name__})"
    if kind in _FUSED:
        return (
            f"{what}: a rank's share of a fused projection would mix its parts; make a Linear of"
            " each part"
        )
    if isinstance(module, nn.Linear):
        return (
            f"{what}: declare whether it opens or closes its layer: parallelize(model, ...,"
            f" column=[{kind!r}]) or row=[{kind!r}]"
        )
    return f"{what}: it places Linear, Embedding and norms; use a layout with tensor 1"
