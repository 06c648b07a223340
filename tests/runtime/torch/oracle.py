"""A small transformer, and how it trains in one process with nothing but PyTorch.

What the runtime computes under any layout is compared with this loop.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from train_gpt import GPT, Config, cross_entropy, first_weights

from dtrain.runtime.torch.weights import Materializer

SEED = 3
BATCH = 8
CONTEXT = 16
STEPS = 4
CONFIG = Config(width=32, layers=4, heads=4, kv_heads=4, vocabulary=64)


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


def meta_model(config: Config = CONFIG) -> nn.Module:
    with torch.device("meta"):
        return GPT(config)


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def global_batches() -> list[Tensor]:
    """(BATCH, CONTEXT + 1) for each step: the order that the seed fixes."""
    rows = Rows().rows
    generator = torch.Generator().manual_seed(SEED)
    return [rows[part] for part in torch.randperm(len(rows), generator=generator).split(BATCH)]


def expected(steps: int = STEPS) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and gradient norms of each step, and the weights after the last."""
    model = meta_model()
    Materializer(torch.device("cpu"), SEED, first_weights)("", model)
    optimizer = optimizer_of(list(model.parameters()))
    losses, norms = [], []
    for batch in global_batches()[:steps]:
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}
