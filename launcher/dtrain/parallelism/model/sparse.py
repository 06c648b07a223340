"""Parts of layers with sparse attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from dtrain.parallelism.model.parts import LayerPart
from dtrain.records import dataclass


@dataclass(frozen=True)
class Indexer(LayerPart):
    """What chooses the keys of sparse attention: scores of all tokens before a token, from few and
    small heads (DeepSeek-V3.2, arXiv 2512.02556, section 2.1, equation 1).

    Queries come from attention's latent of ``query_rank`` elements, one key and the heads' weights
    from the hidden state. Every tensor rank computes it whole.
    """

    title: ClassVar[str] = "sparse attention with an indexer (DeepSeek-V3.2)"
    short: ClassVar[str] = "indexer"
    kernels: ClassVar[int] = 12
    own_sum: ClassVar[bool] = False
    attends: ClassVar[bool] = True

    heads: int
    size: int
    query_rank: int
    length: int
    """Tokens of the sequence."""

    def parameters(self, hidden: int) -> int:
        queries = self.query_rank * self.heads * self.size
        return queries + hidden * (self.size + self.heads) + 2 * self.size

    def products(self, hidden: int, tensor: int) -> Iterator[tuple[float, float, float]]:
        yield 1.0, self.query_rank, self.heads * self.size
        yield 1.0, hidden, self.size + self.heads

    @property
    def model_flop(self) -> float:
        """Scores with the tokens before each token, half of the sequence on average."""
        return 1.0 * self.length * self.heads * self.size

    def kept(self, hidden: int, tensor: int, split: int) -> float:
        """Queries, the key and the weights. A fused kernel keeps no scores."""
        return 2.0 * (self.heads * self.size + self.size + self.heads)

    def scaled(self, ratio: float) -> Indexer:
        return replace(self, length=max(1, round(self.length * ratio)))


@dataclass(frozen=True)
class CompressedAttention(LayerPart):
    """Attention to entries that each stand for ``rate`` tokens, and to the last ``window`` tokens
    (DeepSeek-V4, arXiv 2606.19348, section 2.3). All heads share one key, which is the value, too.

    With a ``chosen`` number of entries, an indexer picks those (compressed sparse attention), and
    entries come from two series of keys, whose tokens overlap. Otherwise a token attends to all
    entries before it (heavily compressed attention), or with a rate of 0 to the window alone. The
    output returns in ``groups`` of heads: from each group to ``output_rank`` elements, and from
    those of all groups to the hidden state.
    """

    title: ClassVar[str] = "attention to compressed keys (DeepSeek-V4)"
    short: ClassVar[str] = "compressed attention"
    kernels: ClassVar[int] = 24
    attends: ClassVar[bool] = True

    heads: int
    head_size: int
    query_rank: int
    groups: int
    output_rank: int
    window: int
    length: int
    """Tokens of the sequence."""
    rate: int = 0
    chosen: int = 0
    index_heads: int = 0
    index_size: int = 0

    @property
    def _width(self) -> int:
        return self.heads * self.head_size

    @property
    def _compressed(self) -> int:
        """Keys and gates of a token that entries are made of, those of the indexer too."""
        if not self.rate:
            return 0
        return 4 * (self.head_size + self.index_size) if self.chosen else 2 * self.head_size

    @property
    def _read(self) -> int:
        """Outputs of the products with the hidden state."""
        return self.query_rank + self.head_size + self._compressed + self.index_heads

    @property
    def _entries(self) -> int:
        return self.length // self.rate if self.rate else 0

    def parameters(self, hidden: int) -> int:
        queries = self.query_rank * (self._width + self.index_heads * self.index_size)
        output = self._width * self.output_rank + self.groups * self.output_rank * hidden
        # Norms, one weight for each head beside the scores, and positions in an entry.
        norms = hidden + self.query_rank + 2 * self.head_size + self.index_size
        positions = self.rate * self._compressed // 2
        return hidden * self._read + queries + output + norms + self.heads + positions

    def products(self, hidden: int, tensor: int) -> Iterator[tuple[float, float, float]]:
        yield 1.0, hidden, self._read
        yield 1.0, self.query_rank, self._width / tensor
        if self.index_heads:
            yield 1.0, self.query_rank, self.index_heads * self.index_size
        yield self.groups / tensor, self._width / self.groups, self.output_rank
        yield 1.0, self.groups * self.output_rank / tensor, hidden

    @property
    def model_flop(self) -> float:
        """Scores with the keys that a token sees, and their product with the values; and the
        indexer's scores with the entries before it, half of them on average."""
        seen = _mean_before(self.length, self.window)
        seen += _mean_before(self._entries, self.chosen or self._entries)
        index = 1.0 * self._entries * self.index_heads * self.index_size
        return 4.0 * self._width * seen + index

    def split_passes(self, hidden: int) -> float:
        """Norm and rotation of queries, and the output's rotation back."""
        return 6.0 * self._width

    @property
    def exchanged(self) -> float:
        """The window's keys, and the entries."""
        return 2.0 * self.head_size

    def kept(self, hidden: int, tensor: int, split: int) -> float:
        """The inputs of norm and first products; the latent, and the keys, before and after their
        norms; what entries are made of; queries before and after their norm, attention's output,
        and the last product's input; and the indexer's queries and weights. A fused kernel keeps
        no scores."""
        whole = 2 * (self.query_rank + self.head_size) + self._compressed
        whole += self.index_heads * (self.index_size + 1)
        parts = 3 * self._width + self.groups * self.output_rank
        return 4 * hidden / split + 2 * whole + 2 * parts / tensor

    @property
    def units(self) -> tuple[int, ...]:
        return (self.heads, self.groups)

    def scaled(self, ratio: float) -> CompressedAttention:
        return replace(self, length=max(1, round(self.length * ratio)))


def _mean_before(length: int, most: int) -> float:
    """Return the mean number of entries before one of ``length``, if at most ``most`` count."""
    return most * (1 - most / (2 * length)) if most < length else length / 2
