"""The shape of a model, a sequence of layers, and its number of parameters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property

from dtrain.parallelism.model.adapters import Lora
from dtrain.parallelism.model.parts import LayerPart
from dtrain.records import KeepsHash, dataclass


@dataclass(frozen=True)
class Shape(KeepsHash):
    """A stack of layers. A layer has attention if ``heads`` is above 0, an MLP or experts if
    ``ffn_hidden`` is, and ``parts``. All layers are equal unless there is a ``pattern``.

    All sizes are numbers of elements. ``ffn_hidden`` is the inner width of one MLP: the dense
    one, or each expert.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    vocab: int
    seq_len: int
    """Tokens in one training sequence."""
    head_size: int
    """Elements of one attention head; usually hidden / heads."""
    gated: bool = True
    """Whether the MLP has three matrices (SwiGLU) instead of two (GELU)."""
    tied: bool = False
    """Whether the input embedding and the output layer are one matrix."""
    learned_positions: bool = False
    dropout: bool = False
    """Whether there is dropout, which keeps a mask of activations (GPT-2, GPT-3)."""
    experts: int = 0
    """0 for a dense model."""
    experts_per_token: int = 0
    shared_experts: int = 0
    """Shared experts that process every token, of the same width as routed experts."""
    dense_layers: int = 0
    """Number of first layers in a mixture of experts that have one dense MLP instead."""
    dense_ffn_hidden: int = 0
    """Inner width of the MLP of those dense layers."""
    kv_rank: int = 0
    """Width of the latent for keys and values (DeepSeek's MLA); 0 without MLA.

    ``head_size`` is then the size of queries and keys with the rotary part, and every head has
    separate keys.
    """
    query_rank: int = 0
    """Width of the latent for queries; 0 if queries come from the hidden state."""
    rope_head_size: int = 0
    """The rotary part of ``head_size``, whose keys all heads share under MLA."""
    value_head_size: int = 0
    """Elements of one head's values, if not ``head_size``; else 0."""
    causal: bool = True
    """Whether a token sees only the tokens before it; False for encoders (BERT, ViT)."""
    parallel: bool = False
    """Whether attention and MLP read the same norm, and one sum adds both to the residual stream,
    as in PaLM (arXiv 2204.02311, section 2): half of the norms and of tensor-parallel traffic."""
    parts: tuple[LayerPart, ...] = ()
    """What each layer has beside attention and the MLP."""
    qk_norm: bool = False
    """Whether each layer has norms of queries and keys (Qwen3, OLMo 2, Gemma 3). Their few
    parameters do not count."""
    pattern: tuple[Shape, ...] = ()
    """Each layer in order, if they differ: a shape of one layer. The sizes of this shape are then
    those of its layers with attention, or with experts."""
    attended: int = 0
    """Keys that a token attends to at most; 0 if to all (DeepSeek-V3.2's sparse attention, and
    sliding windows)."""
    attends_to_all: float = 0.0
    """Share of the layers to which ``attended`` does not apply, as in Gemma 3."""
    attends_in_chunks: bool = False
    """Whether a token attends to those of the ``attended`` tokens of its chunk that are before it,
    as in Llama 4; otherwise to the last ``attended`` ones."""
    input_parameters: int = 0
    """Parameters before the first layer, if they are not a table of ``vocab`` rows: embeddings of
    patches, time steps and classes."""
    target_len: int = 0
    """Tokens of a sequence that the output layer predicts, if not ``seq_len`` (T5's decoder)."""
    name: str = ""
    lora: Lora | None = None
    """The adapters, if only they are trained."""

    @cached_property
    def kinds(self) -> tuple[tuple[Shape, int], ...]:
        """The kinds of layers of the ``pattern``, and the number of layers of each."""
        return tuple(Counter(self.pattern).items())

    @cached_property
    def tensor_units(self) -> tuple[int, ...]:
        """Numbers that the number of tensor ranks must divide."""
        units = (self.heads, self.ffn_hidden, *(unit for part in self.parts for unit in part.units))
        inner = (unit for kind, _ in self.kinds for unit in kind.tensor_units)
        return tuple({unit: None for unit in (*units, *inner) if unit})

    @cached_property
    def every_part(self) -> tuple[LayerPart, ...]:
        """The parts of all kinds of layers."""
        return (*self.parts, *(part for kind, _ in self.kinds for part in kind.parts))

    @property
    def attended_share(self) -> float:
        """Scores of sparse attention as a share of all scores under a causal mask: each token has
        ``attended`` of them, and the first tokens, of a chunk or of the sequence, as many as there
        are before them. The mean of the layers."""
        if not self.attended or self.attended >= self.seq_len:
            return 1.0
        share = self.attended / self.seq_len
        if not self.attends_in_chunks:
            share *= 2 - share
        return self.attends_to_all + (1 - self.attends_to_all) * share

    @property
    def sums(self) -> int:
        """Sums of one layer with the residual stream, each with a norm: of attention, of the MLP,
        and of parts."""
        blocks = bool(self.heads) + bool(self.ffn_hidden)
        own = sum(part.own_sum for part in self.parts)
        return (1 if self.parallel else blocks) + own

    def with_lengths(self, seq_len: int, vocab: int) -> Shape:
        """Return the shape for sequences of ``seq_len`` tokens of ``vocab`` words. Sequences of
        other lengths in the same model become longer or shorter by the same factor."""
        same = {kind: kind for kind in self.pattern}
        if seq_len != self.seq_len:
            ratio = seq_len / self.seq_len
            same = {kind: kind._scaled(ratio) for kind in self.pattern}
            self = self._scaled(ratio)
        pattern = tuple(same[kind] for kind in self.pattern)
        return replace(self, seq_len=seq_len, vocab=vocab, pattern=pattern)

    def _scaled(self, ratio: float) -> Shape:
        return replace(
            self,
            seq_len=max(1, round(self.seq_len * ratio)),
            target_len=self.target_len and max(1, round(self.target_len * ratio)),
            parts=tuple(part.scaled(ratio) for part in self.parts),
        )

    @cached_property
    def attention_parameters(self) -> int:
        """Parameters of one layer's query, key, value and output matrices.

        2·h²·(1 + kv_heads/heads) if heads · head_size = h (Megatron-LM,
        ``theoretical_memory_usage.py``); with latents, DeepSeek-V2 (arXiv 2405.04434) eq. 9 to 13
        and the norms of the latents.
        """
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        if not self.kv_rank:
            return self.hidden * (2 * queries + 2 * keys)
        values = self.heads * (self.value_head_size or self.head_size)
        unrotated = queries - self.heads * self.rope_head_size
        down = self.kv_rank + self.rope_head_size
        inputs = self.query_rank or self.hidden
        return (
            self.hidden * (self.query_rank + down + values)
            + inputs * queries
            + self.kv_rank * (unrotated + values)
            + self.query_rank
            + self.kv_rank
        )

    @property
    def matrices(self) -> int:
        """Matrices of one MLP, each ``hidden`` by ``ffn_hidden``."""
        return 3 if self.gated else 2

    @cached_property
    def streams(self) -> int:
        """Residual streams, each of ``hidden`` elements."""
        return max((part.streams for part in self.every_part), default=1)

    @cached_property
    def expert_width(self) -> int:
        """Elements of a token that a routed expert reads and writes."""
        return max((part.expert_width for part in self.every_part), default=0) or self.hidden

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert."""
        return self.matrices * self.expert_width * self.ffn_hidden

    @cached_property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        if self.pattern:
            return sum(count for kind, count in self.kinds if kind.experts)
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def norm_parameters(self) -> int:
        """Parameters of one layer's norms, of attention and the MLP, with biases if the MLP is not
        gated (LayerNorm)."""
        return (bool(self.heads) + bool(self.ffn_hidden)) * self._norm

    @property
    def _norm(self) -> int:
        return self.hidden * (1 if self.gated else 2)

    @property
    def bias_parameters(self) -> int:
        """Bias parameters of one GPT-2 layer; models with gated MLPs have none."""
        if self.gated:
            return 0
        keys = self.kv_heads * self.head_size
        return self.heads * self.head_size + 2 * keys + 2 * self.hidden + self.ffn_hidden

    def mlp_parameters(self, *, moe: bool) -> int:
        """Parameters of one layer's MLP, or of its router and all of its experts."""
        if moe:
            shared = self.shared_experts * self.matrices * self.hidden * self.ffn_hidden
            return self.experts * self.expert_parameters + shared + self.hidden * self.experts
        width = (self.dense_ffn_hidden if self.experts else 0) or self.ffn_hidden
        return self.matrices * self.hidden * width

    def layer_parameters(self, *, moe: bool | None = None) -> int:
        """Parameters of one layer: of a layer with experts if ``moe``, by default if it has any."""
        if moe is None:
            moe = bool(self.experts)
        return self._moe_layer_parameters if moe else self._dense_layer_parameters

    @cached_property
    def _moe_layer_parameters(self) -> int:
        return self._outside_mlp + self.mlp_parameters(moe=True)

    @cached_property
    def _dense_layer_parameters(self) -> int:
        return self._outside_mlp + self.mlp_parameters(moe=False)

    @property
    def _outside_mlp(self) -> int:
        own = sum(part.parameters(self.hidden) for part in self.parts)
        return self.attention_parameters + self.norm_parameters + self.bias_parameters + own

    def adapter_parameters(self, *, moe: bool, active: bool = False) -> int:
        """Parameters of one layer's adapters; with ``active``, those that one token uses."""
        return 0 if self.lora is None else self.lora.parameters(self, moe=moe, active=active)

    @property
    def expert_adapter_parameters(self) -> int:
        """Parameters of the adapters of one expert."""
        if self.lora is None or not self.lora.adapts_mlp:
            return 0
        return self.lora.rank * self.matrices * (self.hidden + self.ffn_hidden)

    @cached_property
    def trained_parameters(self) -> int:
        """Parameters with gradients and optimizer states: all, or the adapters' only."""
        if self.lora is None:
            return self.parameters
        dense = (self.layers - self.moe_layers) * self.adapter_parameters(moe=False)
        return dense + self.moe_layers * self.adapter_parameters(moe=True)

    @property
    def frozen_matrix_bytes(self) -> float:
        """Bytes of a frozen parameter of a layer that is stored in fewer bits; 0 if none is."""
        return 0.0 if self.lora is None else self.lora.matrix_bytes

    @cached_property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding, with learned positions if there are any."""
        if self.input_parameters:
            return self.input_parameters
        return (self.vocab + (self.seq_len if self.learned_positions else 0)) * self.hidden

    @cached_property
    def head_parameters(self) -> int:
        """Parameters of the output layer, even if it shares its matrix with the embedding."""
        return self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        """All parameters; a tied matrix counts once."""
        moe = self.moe_layers
        layers = moe * self.layer_parameters(moe=True)
        layers += (self.layers - moe) * self.layer_parameters(moe=False)
        if self.pattern:
            layers = sum(count * kind.layer_parameters() for kind, count in self.kinds)
        return (
            layers
            + self.embedding_parameters
            + (0 if self.tied else self.head_parameters)
            + self._norm
        )

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token uses, of experts."""
        if self.pattern:
            return self.parameters - sum(count * kind._idle_experts for kind, count in self.kinds)
        return self.parameters - self.moe_layers * self._idle_experts

    @property
    def _idle_experts(self) -> int:
        """Parameters of the experts of one layer that a token does not use."""
        return (self.experts - self.experts_per_token) * self.expert_parameters

    @cached_property
    def layer_flop(self) -> float:
        """FLOPs of one token in the forward pass of one layer, in products with weights and in
        parts, without attention's scores."""
        own = sum(part.parameters(self.hidden) for part in self.parts)
        flop = 2.0 * (self.layer_parameters() - self._idle_experts - own)
        for part in self.parts:
            flop += part.model_flop
            flop += sum(2.0 * rows * k * n for rows, k, n in part.products(self.hidden, 1))
        return flop


def residual(shape: Shape) -> int:
    """Return the elements of all residual streams for each token."""
    return shape.hidden * shape.streams
