"""Low-rank adapters of a frozen model (LoRA, arXiv 2106.09685; QLoRA, arXiv 2305.14314)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from dtrain.records import dataclass

if TYPE_CHECKING:
    from dtrain.parallelism.model.shape import Shape

Targets = Literal["all", "attention"]
BaseBits = Literal[16, 8, 4]

NF4 = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes of a 4-bit weight: 4 bits, an 8-bit scale for each 64 weights, and a 32-bit scale for each
256 of those (QLoRA, section 3, double quantization)."""
NF4_ONCE = (4 + 32 / 64) / 8
"""Bytes of a 4-bit weight with 32-bit scales, bitsandbytes' default."""


@dataclass(frozen=True)
class Lora:
    """Adapters beside matrices of each layer. Only they are trained, everything else is frozen.

    An adapter of an m × n matrix is an m × rank and a rank × n matrix.
    """

    rank: int
    targets: Targets = "all"
    """``attention``: queries, keys, values and output; ``all``: those and the MLP's matrices."""
    base_bits: BaseBits = 16
    """Bits of a frozen matrix of a layer; embeddings, norms and output layer keep 16. With 8, it is
    in fp8, as products with fp8 read it (Transformer Engine's ``fp8_model_init``)."""

    dropout: int = 0
    """Adapters of queries, keys and values that drop some of their input, and so keep their own
    copies and masks. The MLP's adapters then do so, too. 0 without dropout."""
    output_dropout: bool = False
    """Whether the adapter of attention's output also does."""
    double_quantized: bool = True
    """Whether the scales of 4-bit matrices are quantized, too."""

    @property
    def matrix_bytes(self) -> float:
        """Bytes of a frozen matrix's parameter, if fewer than 2; else 0."""
        four = NF4 if self.double_quantized else NF4_ONCE
        return {16: 0.0, 8: 1.0, 4: four}[self.base_bits]

    @property
    def expands(self) -> bool:
        """Whether a product needs a copy of its frozen matrix in 16 bits."""
        return self.base_bits == 4

    @property
    def adapts_mlp(self) -> bool:
        return self.targets == "all"

    @property
    def kernels(self) -> int:
        """Kernels that adapters add to a layer's forward pass: two products, a scale and a sum for
        each of two (fused) matrices of attention and two of the MLP."""
        return 16 if self.adapts_mlp else 8

    def parameters(self, shape: Shape, *, moe: bool, active: bool) -> int:
        """Parameters of one layer's adapters; with ``active``, those that one token uses."""
        h, queries, keys = (
            shape.hidden,
            shape.heads * shape.head_size,
            shape.kv_heads * shape.head_size,
        )
        values = shape.heads * (shape.value_head_size or shape.head_size)
        sides = [(h, queries), (h, keys), (h, keys), (values, h)]
        if shape.kv_rank:
            down = shape.kv_rank + shape.rope_head_size
            unrotated = queries - shape.heads * shape.rope_head_size
            sides = [(h, down), (shape.kv_rank, unrotated + values), (values, h)]
            sides += (
                [(h, shape.query_rank), (shape.query_rank, queries)]
                if shape.query_rank
                else [(h, queries)]
            )
        adapters = self.rank * sum(map(sum, sides))
        if moe:
            copies = (shape.experts_per_token if active else shape.experts) + shape.shared_experts
            return adapters + copies * shape.expert_adapter_parameters
        if self.adapts_mlp:
            dense = (shape.dense_ffn_hidden if shape.experts else 0) or shape.ffn_hidden
            adapters += self.rank * shape.matrices * (h + dense)
        return adapters
