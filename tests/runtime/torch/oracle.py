"""Small transformers, and how they train in one process with nothing but PyTorch.

Tests compare the runtime's results under every layout with this loop.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_gpt import GPT, Attention, Config, cross_entropy, first_weights, rotate

from dtrain.runtime.torch.weights import Materializer

SEED = 3
BATCH = 8
CONTEXT = 16
STEPS = 2
CONFIG = Config(width=32, layers=4, heads=4, kv_heads=2, mlp_width=96, vocabulary=64)


class Rows:
    """Sequences with something to learn: each value follows from the one before."""

    def __init__(self, count: int = 64) -> None:
        generator = torch.Generator().manual_seed(SEED)
        rows = [torch.randint(64, (count, 1), generator=generator)]
        for _ in range(CONTEXT):
            noise = torch.randint(2, (count, 1), generator=generator)
            rows.append((rows[-1] * 5 + 1 + noise) % 64)
        self.rows = torch.cat(rows, dim=1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index, :-1], self.rows[index, 1:]


class NormedAttention(Attention):
    """With norms of queries and keys, as in Qwen3, and biases, as in GPT-2."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.RMSNorm(self.head_dim)
        self.q_proj = nn.Linear(config.width, config.width)
        self.o_proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = (
            part.transpose(1, 2) for part in (rotate(self.q_norm(q)), rotate(self.k_norm(k)), v)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Positioned(GPT):
    """With learned positions, as in GPT-2."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.positions = nn.Embedding(CONTEXT, config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(at)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def meta_model(kind: str = "plain") -> nn.Module:
    """``plain``, ``tied`` (embedding and output layer), ``normed`` (see NormedAttention),
    ``mixture`` (of four experts), ``positioned``, or ``padded``: plain, see `padded`."""
    with torch.device("meta"):
        if kind == "positioned":
            return Positioned(CONFIG)
        model = GPT(replace(CONFIG, experts=4) if kind == "mixture" else CONFIG)
        if kind == "tied":
            model.head.weight = model.embedding.weight
        if kind == "normed":
            for block in model.blocks:
                block.attention = NormedAttention(CONFIG)
        return model


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def global_batches() -> list[Tensor]:
    """(BATCH, CONTEXT + 1) for each step: the order that the seed fixes."""
    rows = Rows().rows
    generator = torch.Generator().manual_seed(SEED)
    return [rows[part] for part in torch.randperm(len(rows), generator=generator).split(BATCH)]


def padded(inputs: Tensor, targets: Tensor) -> Tensor:
    """``targets`` of sequences that end after 1 to CONTEXT of them, by their first value."""
    left_out = torch.arange(CONTEXT) > inputs[:, :1] % CONTEXT
    return targets.masked_fill(left_out, -100)


def expected(kind: str = "plain") -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and gradient norms of each step, and the weights after the last."""
    model = meta_model(kind)
    Materializer(torch.device("cpu"), SEED, first_weights)("", model)
    optimizer = optimizer_of(list(model.parameters()))
    losses, norms = [], []
    for batch in global_batches()[:STEPS]:
        optimizer.zero_grad()
        inputs, targets = batch[:, :-1], batch[:, 1:]
        if kind == "padded":
            targets = padded(inputs, targets)
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}
