"""The model of a trial: a decoder of any width, as the planner's shapes describe it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone gives it
from torch import Tensor, nn

from dtrain.runtime.torch.context import positions
from dtrain.runtime.torch.experts import MixtureOfExperts


@dataclass(frozen=True)
class TrialSizes:
    """Fields of `dtrain.parallelism.model.shape.Shape`, which explains them."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn_hidden: int
    vocab: int
    gated: bool = True
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    layers: int = 1


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped keys and values."""

    def __init__(self, sizes: TrialSizes) -> None:
        super().__init__()
        self.head_size = sizes.head_size
        width, keys = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
        biased = not sizes.gated
        self.q_proj = nn.Linear(sizes.hidden, width, bias=biased)
        self.k_proj = nn.Linear(sizes.hidden, keys, bias=biased)
        self.v_proj = nn.Linear(sizes.hidden, keys, bias=biased)
        self.o_proj = nn.Linear(width, sizes.hidden, bias=biased)

    def forward(self, x: Tensor) -> Tensor:
        # -1 heads: a tensor-parallel rank has only its share of them.
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_size))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = (part.transpose(1, 2) for part in (_rotated(q), _rotated(k), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


def _rotated(heads: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864) of (batch, sequence, heads, head_size)."""
    half = heads.shape[-1] // 2
    rates = 10000.0 ** -(torch.arange(half, device=heads.device) / half)
    # Under context parallelism, a rank has only some positions of each sequence.
    angles = positions(heads.shape[1], heads.device)[:, None, None] * rates
    cos, sin = angles.cos(), angles.sin()
    one, two = heads.float()[..., : 2 * half].chunk(2, dim=-1)
    turned = (one * cos - two * sin, two * cos + one * sin, heads.float()[..., 2 * half :])
    return torch.cat(turned, dim=-1).to(heads.dtype)


class MLP(nn.Module):
    """SwiGLU, or GELU with biases."""

    def __init__(self, sizes: TrialSizes) -> None:
        super().__init__()
        biased = not sizes.gated
        if sizes.gated:
            self.gate_proj = nn.Linear(sizes.hidden, sizes.ffn_hidden, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.ffn_hidden, bias=biased)
        self.down_proj = nn.Linear(sizes.ffn_hidden, sizes.hidden, bias=biased)
        self.gated = sizes.gated

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        inner = F.silu(self.gate_proj(x)) * up if self.gated else F.gelu(up)
        out: Tensor = self.down_proj(inner)
        return out


def _norm(sizes: TrialSizes) -> nn.Module:
    return nn.RMSNorm(sizes.hidden) if sizes.gated else nn.LayerNorm(sizes.hidden)


class TrialBlock(nn.Module):
    """Attention, then an MLP or a mixture of experts, each with a residual connection."""

    def __init__(self, sizes: TrialSizes) -> None:
        super().__init__()
        self.attention_norm = _norm(sizes)
        self.attention = Attention(sizes)
        self.mlp_norm = _norm(sizes)
        self.mlp: nn.Module = MLP(sizes)
        if sizes.experts:
            every = [MLP(sizes) for _ in range(sizes.experts)]
            self.mlp = MixtureOfExperts(sizes.hidden, every, sizes.experts_per_token)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Decoder(nn.Module):
    def __init__(self, sizes: TrialSizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.blocks = nn.ModuleList(TrialBlock(sizes) for _ in range(sizes.layers))
        self.norm = _norm(sizes)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def small_weights(_name: str, module: nn.Module) -> None:
    if isinstance(module, nn.Embedding | nn.Linear):
        nn.init.normal_(module.weight, std=0.02)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
