"""What a layer can have beside attention and an MLP: a decoder's attention to an encoder, experts
on a latent, several residual streams, and what diffusion transformers add.

A `LayerPart` says what it costs for each token; the modules of ``cost`` add this to the costs of
the layer's attention and MLP. Sizes are numbers of elements, FLOPs are of one forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from dtrain.records import dataclass


@dataclass(frozen=True)
class LayerPart:
    """A part of a layer. The defaults are those of a part that does nothing."""

    title: ClassVar[str] = ""
    """Words for the part, as in "does not support …"."""
    short: ClassVar[str] = ""
    """A word for the part in the description of a layer; empty if it needs none."""
    kernels: ClassVar[int] = 4
    """Kernels of a forward pass."""
    attends: ClassVar[bool] = False
    """Whether these FLOPs are flash attention's; otherwise, those of a scan in chunks."""

    def parameters(self, hidden: int) -> int:
        """Parameters, with a norm of the part's input if it has one."""
        raise NotImplementedError

    def idle_parameters(self, hidden: int) -> int:
        """Of these, the parameters that are in no product with each token."""
        return 0

    def products(self, hidden: int, tensor: int) -> Iterator[tuple[float, float, float]]:
        """Yield the products with weights on one of ``tensor`` ranks: rows for each token of the
        layer, and the matrix's two sizes."""
        yield from ()

    @property
    def model_flop(self) -> float:
        """FLOPs of a token beside those with weights, as a step of the recurrence needs them."""
        return 0.0

    @property
    def kernel_flop(self) -> float:
        """FLOPs of a token beside those with weights, as a GPU's kernel computes them."""
        return self.model_flop

    def split_passes(self, hidden: int) -> float:
        """Elements of a token that kernels beside the products read and write, which tensor
        parallelism splits."""
        return 0.0

    @property
    def exchanged(self) -> float:
        """Elements of a token that context ranks exchange: so that each has some heads of the whole
        sequence, the inputs and the output of a scan (Megatron-Core's ``mamba_context_parallel``);
        or keys."""
        return 0.0

    @property
    def own_sum(self) -> bool:
        """Whether the part has a norm and a sum with the residual stream of its own, and tensor
        parallelism's traffic for them."""
        return True

    def kept(self, hidden: int, tensor: int, split: int) -> float:
        """Bytes of a token that the forward pass keeps for the backward pass, for activations of
        16 bits; ``split`` ranks share the sequence between the layer's products."""
        raise NotImplementedError

    @property
    def expert_width(self) -> int:
        """Elements of a token that routed experts read and write; 0 if the hidden size."""
        return 0

    @property
    def streams(self) -> int:
        """Residual streams."""
        return 1

    @property
    def units(self) -> tuple[int, ...]:
        """Numbers that the number of tensor ranks must divide."""
        return ()

    def scaled(self, ratio: float) -> LayerPart:
        """Return the part for sequences that are ``ratio`` times as long."""
        return self


@dataclass(frozen=True)
class CrossAttention(LayerPart):
    """A decoder's attention to an encoder's output (arXiv 1706.03762, section 3.2.3; T5, arXiv
    1910.10683): queries from the decoder, keys and values from the encoder."""

    title: ClassVar[str] = "a decoder's attention to an encoder"
    short: ClassVar[str] = "cross attention"
    kernels: ClassVar[int] = 10
    attends: ClassVar[bool] = True

    heads: int
    head_size: int
    source: int
    """Tokens of the encoder's sequence."""
    target: int
    """Tokens of the decoder's sequence."""

    @property
    def width(self) -> int:
        return self.heads * self.head_size

    def parameters(self, hidden: int) -> int:
        return 4 * hidden * self.width + hidden

    def products(self, hidden: int, tensor: int) -> Iterator[tuple[float, float, float]]:
        yield 1.0, hidden, self.width / tensor
        yield self.source / self.target, hidden, 2 * self.width / tensor
        yield 1.0, self.width / tensor, hidden

    @property
    def model_flop(self) -> float:
        """Scores with all tokens of the encoder, and their product with the values."""
        return 4.0 * self.source * self.width

    def split_passes(self, hidden: int) -> float:
        return 2.0 * self.width

    def kept(self, hidden: int, tensor: int, split: int) -> float:
        """The inputs of norm and first product, queries and output, and keys and values of the
        encoder's tokens. All layers share the encoder's output itself."""
        rows = self.source / self.target
        return 4 * hidden / split + 2 * self.width * (2 + 2 * rows) / tensor

    @property
    def units(self) -> tuple[int, ...]:
        return (self.heads,)

    def scaled(self, ratio: float) -> CrossAttention:
        source, target = round(self.source * ratio), max(1, round(self.target * ratio))
        return replace(self, source=source, target=target)


@dataclass(frozen=True)
class LatentExperts(LayerPart):
    """Routed experts on a latent of ``size`` elements (LatentMoE, Nemotron 3, arXiv 2512.20856): a
    product before them and one after. Router and shared experts read the hidden state.

    Tensor ranks have whole matrices, and each a part of the sequence (Megatron-Core's
    ``fc1_latent_proj``).
    """

    title: ClassVar[str] = "experts on a latent (LatentMoE)"
    kernels: ClassVar[int] = 2
    own_sum: ClassVar[bool] = False

    size: int

    @property
    def expert_width(self) -> int:
        return self.size

    def parameters(self, hidden: int) -> int:
        return 2 * hidden * self.size

    def products(self, hidden: int, tensor: int) -> Iterator[tuple[float, float, float]]:
        yield 1 / tensor, hidden, self.size
        yield 1 / tensor, self.size, hidden

    def kept(self, hidden: int, tensor: int, split: int) -> float:
        """The second product's input. The norm's output, the first one's, is kept anyway."""
        return 2 * self.size / split


@dataclass(frozen=True)
class HyperConnections(LayerPart):
    """Several residual streams (mHC, arXiv 2512.24880): one connection before attention and one
    before the MLP. Each computes weights from all streams, in 32 bits: for their sum, which the
    block reads; for what each gets of the block's output; and for a mixture of the streams."""

    title: ClassVar[str] = "several residual streams (hyper-connections)"
    kernels: ClassVar[int] = 12
    own_sum: ClassVar[bool] = False

    count: int

    @property
    def streams(self) -> int:
        return self.count

    @property
    def _weights(self) -> int:
        return self.count * (self.count + 2)

    def parameters(self, hidden: int) -> int:
        return 2 * (self._weights * (self.count * hidden + 1) + 3)

    def products(self, hidden: int, tensor: int) -> Iterator[tuple[float, float, float]]:
        yield 2 / tensor, self.count * hidden, self._weights

    def split_passes(self, hidden: int) -> float:
        """Each connection reads the streams for the sum and for the mixture, and writes them."""
        return 2 * 3.0 * self.count * hidden

    def kept(self, hidden: int, tensor: int, split: int) -> float:
        """The streams and the block's output, of each connection."""
        return 2 * 2 * (self.count + 1) * hidden / split


@dataclass(frozen=True)
class OutputGate(LayerPart):
    """A gate of attention's output, from the same input as the queries (Qwen3-Next)."""

    title: ClassVar[str] = "gates of attention's output"
    kernels: ClassVar[int] = 2
    own_sum: ClassVar[bool] = False

    width: int

    def parameters(self, hidden: int) -> int:
        return hidden * self.width

    def products(self, hidden: int, tensor: int) -> Iterator[tuple[float, float, float]]:
        yield 1.0, hidden, self.width / tensor

    def split_passes(self, hidden: int) -> float:
        return 3.0 * self.width

    def kept(self, hidden: int, tensor: int, split: int) -> float:
        """The gate, and attention's gated output."""
        return 4 * self.width / tensor


@dataclass(frozen=True)
class Modulation(LayerPart):
    """Adaptive norms of a diffusion transformer (adaLN-Zero, DiT, arXiv 2212.09748, section 3.2):
    ``vectors`` shifts, scales and gates of the layer, from one vector for each sequence."""

    title: ClassVar[str] = "adaptive norms (diffusion transformers)"
    short: ClassVar[str] = "adaLN"
    kernels: ClassVar[int] = 8
    own_sum: ClassVar[bool] = False

    vectors: int = 6

    def parameters(self, hidden: int) -> int:
        return self.vectors * hidden * (hidden + 1)

    def idle_parameters(self, hidden: int) -> int:
        """All: the product has one row for each sequence, which is not counted."""
        return self.parameters(hidden)

    def split_passes(self, hidden: int) -> float:
        return 4.0 * hidden

    def kept(self, hidden: int, tensor: int, split: int) -> float:
        """For the gradients of a scale and a gate: the norm's output before it, and the output of
        attention or MLP; one of each for three vectors."""
        return 2 * (2 * self.vectors / 3) * hidden / split


@dataclass(frozen=True)
class Twin(LayerPart):
    """The matrices of a second stream of tokens, which attention joins with the first (MM-DiT,
    arXiv 2403.03206, figure 2): each token uses one of the two sets."""

    title: ClassVar[str] = "two streams of tokens (MM-DiT)"
    short: ClassVar[str] = "two streams"
    kernels: ClassVar[int] = 20
    own_sum: ClassVar[bool] = False

    count: int
    """Parameters of the second set."""

    def parameters(self, hidden: int) -> int:
        return self.count

    def idle_parameters(self, hidden: int) -> int:
        return self.count

    def kept(self, hidden: int, tensor: int, split: int) -> float:
        return 0.0
