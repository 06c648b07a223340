"""Parts of layers that mix tokens without attention: state spaces, linear attention and
convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from dtrain.parallelism.model.parts import LayerPart
from dtrain.records import dataclass


@dataclass(frozen=True)
class Mamba2(LayerPart):
    """A state-space mixer (Mamba-2, arXiv 2405.21060).

    One product gives gate, values, keys, queries and time steps: 2·d + 2·groups·state + heads, with
    d = heads · head_size. A convolution over ``conv`` tokens follows, the scan, a gated norm, and a
    product back (the paper's section 7.1 and figure 6; parameters as in ``mamba_ssm``'s
    ``Mamba2``).
    """

    title: ClassVar[str] = "state-space layers (Mamba-2)"
    short: ClassVar[str] = "Mamba-2"
    kernels: ClassVar[int] = 16

    heads: int
    head_size: int
    state: int
    groups: int = 1
    conv: int = 4
    chunk: int = 256
    """Tokens that the scan's kernel computes as one block; 256 in ``mamba_ssm``, 128 in files of
    Nemotron-H."""
    gated_norm: bool = True
    beside: bool = False
    """Whether it reads attention's norm, and one sum adds both to the residual stream
    (Falcon-H1)."""

    @property
    def inner(self) -> int:
        return self.heads * self.head_size

    @property
    def projected(self) -> int:
        """Outputs of the first product for each token."""
        return 2 * self.inner + 2 * self.groups * self.state + self.heads

    def parameters(self, hidden: int) -> int:
        convolved = self.inner + 2 * self.groups * self.state
        own = (self.conv + 1) * convolved + 3 * self.heads + self.gated_norm * self.inner
        norm = 0 if self.beside else hidden
        return hidden * (self.projected + self.inner) + own + norm

    def products(self, hidden: int, tensor: int) -> Iterator[tuple[float, float, float]]:
        yield 1.0, hidden, self.projected / tensor
        yield 1.0, self.inner / tensor, hidden

    @property
    def model_flop(self) -> float:
        """7·d·state, as Megatron-LM counts the recurrence (``num_floating_point_operations``)."""
        return 7.0 * self.inner * self.state

    @property
    def kernel_flop(self) -> float:
        """FLOPs of the blocks of section 6: scores of a chunk's tokens and their product with the
        values, 2·chunk·(groups·state + d); states of chunks, and outputs of states, 4·state·d."""
        scores = self.groups * self.state + self.inner
        return 2.0 * self.chunk * scores + 4.0 * self.state * self.inner

    def split_passes(self, hidden: int) -> float:
        """The convolution and the scan read and write what the product gave and the inner tensors,
        the norm reads output and gate."""
        return 2.0 * self.projected + 5.0 * self.inner

    @property
    def exchanged(self) -> float:
        return float(self.projected + self.inner)

    @property
    def own_sum(self) -> bool:
        return not self.beside

    def kept(self, hidden: int, tensor: int, split: int) -> float:
        """The inputs of norm and first product; of the fused convolution and scan
        (``mamba_split_conv1d_scan_combined``), which computes the rest again, its input and its
        output before the norm; and the input of the last product."""
        around = 0 if self.beside else 4 * hidden / split
        return around + 2 * (self.projected + 2 * self.inner) / tensor

    @property
    def units(self) -> tuple[int, ...]:
        return (self.heads, self.groups) if self.groups > 1 else (self.heads,)


@dataclass(frozen=True)
class DeltaNet(LayerPart):
    """Linear attention with the gated delta rule (Gated DeltaNet, arXiv 2412.06464), as in
    Qwen3-Next: a product gives queries, keys, values and an output gate, another one two gates for
    each head; a convolution, the scan, a gated norm of each head, and a product back."""

    title: ClassVar[str] = "linear attention (Gated DeltaNet)"
    short: ClassVar[str] = "DeltaNet"
    kernels: ClassVar[int] = 24

    key_heads: int
    key_size: int
    heads: int
    """Heads of values; several may share a key head."""
    value_size: int
    conv: int = 4
    chunk: int = 64
    """Tokens of a block of flash-linear-attention's kernel."""

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        return self.heads * self.value_size

    @property
    def projected(self) -> int:
        return 2 * self.keys + 2 * self.values + 2 * self.heads

    def parameters(self, hidden: int) -> int:
        convolved = self.conv * (2 * self.keys + self.values)
        own = convolved + 2 * self.heads + self.value_size
        return hidden * (self.projected + self.values) + own + hidden

    def products(self, hidden: int, tensor: int) -> Iterator[tuple[float, float, float]]:
        yield 1.0, hidden, self.projected / tensor
        yield 1.0, self.values / tensor, hidden

    @property
    def model_flop(self) -> float:
        """7 for each element of a head's state: its decay, its product with the key, the outer
        product that corrects it, and its product with the query (equation 10)."""
        return 7.0 * self.heads * self.key_size * self.value_size

    @property
    def kernel_flop(self) -> float:
        """FLOPs of the blocks of section 3.3 for each head: K·Kᵀ, its inverse (chunk²), and the
        inverse times keys and values, the chunk's scores and their product with the values; and
        three products with the state."""
        k, v, chunk = self.key_size, self.value_size, self.chunk
        each = chunk * (6.0 * k + 4.0 * v) + chunk**2 + 6.0 * k * v
        return self.heads * each

    def split_passes(self, hidden: int) -> float:
        spread = self.heads * self.key_size
        return 3.0 * self.projected + 6.0 * spread + 6.0 * self.values

    @property
    def exchanged(self) -> float:
        return float(self.projected + self.values)

    def kept(self, hidden: int, tensor: int, split: int) -> float:
        """The inputs of norm and first products; the convolution's input; the kernel's queries and
        keys of each value head, values, gates (4 and 2 bytes) and inverses (flash-linear-attention,
        ``ChunkGatedDeltaRuleFunction``); its output, the output gate, and the last product's
        input."""
        convolved = 2 * self.keys + self.values
        spread = 2 * self.heads * self.key_size + self.values
        inner = 2 * (convolved + spread + 3 * self.values + self.heads * self.chunk)
        return 4 * hidden / split + (inner + 10 * self.heads) / tensor

    @property
    def units(self) -> tuple[int, ...]:
        return (self.key_heads, self.heads)


@dataclass(frozen=True)
class KimiDelta(DeltaNet):
    """Linear attention whose delta rule has a decay for each element of a key (Kimi Delta
    Attention, arXiv 2510.26692): products of low rank give the decays and the output gate."""

    title: ClassVar[str] = "linear attention (Kimi Delta Attention)"
    short: ClassVar[str] = "KDA"
    kernels: ClassVar[int] = 28

    gate_rank: int = 0
    """Inner width of the products for the decays and for the output gate; 0 if each is one product
    (Ling 3.0)."""

    @property
    def projected(self) -> int:
        gates = 2 * self.gate_rank or self.keys + self.values
        return 2 * self.keys + self.values + self.heads + gates

    def parameters(self, hidden: int) -> int:
        spread = self.gate_rank * (self.keys + self.values)
        own = self.conv * (2 * self.keys + self.values) + self.keys + self.heads + self.value_size
        return hidden * (self.projected + self.values) + spread + own + hidden

    def products(self, hidden: int, tensor: int) -> Iterator[tuple[float, float, float]]:
        yield from super().products(hidden, tensor)
        if self.gate_rank:
            yield 1.0, self.gate_rank, self.keys / tensor
            yield 1.0, self.gate_rank, self.values / tensor

    def kept(self, hidden: int, tensor: int, split: int) -> float:
        """Also the decays, in 32 bits, and the input of their second product."""
        decays = 4 * self.keys / tensor + 4 * self.gate_rank
        return super().kept(hidden, tensor, split) + decays


@dataclass(frozen=True)
class ShortConv(LayerPart):
    """A gated convolution over few tokens (LFM2, arXiv 2511.23404): a product gives a
    value and two gates, before and after the convolution; and a product back."""

    title: ClassVar[str] = "gated convolutions (LFM2)"
    short: ClassVar[str] = "convolution"
    kernels: ClassVar[int] = 8

    conv: int

    def parameters(self, hidden: int) -> int:
        return 4 * hidden**2 + self.conv * hidden + hidden

    def products(self, hidden: int, tensor: int) -> Iterator[tuple[float, float, float]]:
        yield 1.0, hidden, 3 * hidden / tensor
        yield 1.0, hidden / tensor, hidden

    def split_passes(self, hidden: int) -> float:
        return 8.0 * hidden

    def kept(self, hidden: int, tensor: int, split: int) -> float:
        """The inputs of norm and first product; value and gates, the convolution's input and
        output, and the last product's input."""
        return 4 * hidden / split + 2 * 6 * hidden / tensor
