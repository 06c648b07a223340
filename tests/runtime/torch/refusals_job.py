"""Two ranks that try invalid operations and print the errors.

refusals_job.py REPORT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from oracle import BATCH, meta_model
from torch import Tensor, nn
from train_gpt import GPT, Config, cross_entropy, first_weights

from dtrain.runtime import torch as parallel

Layout = parallel.Layout
TENSOR = Layout(tensor=2, sequence_parallel=True)
PIPELINE = Layout(pipeline=2)
SHARDED = Layout(data=2, sharding="full")
CONTEXT = Layout(context=2)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)


class AllHeads(nn.Module):
    """Attention that requires all four heads, of 8 features each."""

    def __init__(self, split: tuple[int, int]) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(32, 32), nn.Linear(32, 32)
        self.split = split

    def forward(self, x: Tensor) -> Tensor:
        heads = self.q_proj(x).view(*x.shape[:2], *self.split).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class ByHand(AllHeads):
    """The same, without the function that would show how large the heads are."""

    def forward(self, x: Tensor) -> Tensor:
        heads = self.q_proj(x).view(*x.shape[:2], *self.split).transpose(1, 2)
        weights = (heads @ heads.mT / heads.shape[-1] ** 0.5).softmax(-1)
        return self.o_proj((weights @ heads).transpose(1, 2).flatten(2))


class Masked(AllHeads):
    """Requires a mask, which no caller passes."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is not None, "no mask"
        return super().forward(x)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 2)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))


class Positions(nn.Module):
    """Adds nothing, but has a buffer that is built with its values, which meta tensors lose."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(16))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Uninitialized(nn.RMSNorm):
    def reset_parameters(self) -> None:
        """Nothing."""


def model(change: Callable[[Any], None]) -> nn.Module:
    with torch.device("meta"):
        made = GPT(Config(width=32, layers=2, heads=4, kv_heads=2, mlp_width=96, vocabulary=64))
        change(made)
        return made


def attention(made: Callable[[], nn.Module]) -> Callable[[Any], None]:
    return lambda gpt: setattr(gpt.blocks[0], "attention", made())


def with_another_module(gpt: Any) -> None:
    gpt.blocks[1].mlp_norm = nn.PReLU()


class WithPositions(GPT):
    def __init__(self) -> None:
        super().__init__(
            Config(width=32, layers=2, heads=4, kv_heads=2, mlp_width=96, vocabulary=64)
        )
        self.positions = nn.Embedding(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def with_positions() -> nn.Module:
    with torch.device("meta"):
        return WithPositions()


def tied(gpt: Any) -> None:
    gpt.head.weight = gpt.embedding.weight


def with_a_frozen_block(gpt: Any) -> None:
    gpt.embedding.requires_grad_(False)
    gpt.blocks[0].requires_grad_(False)


def different(run: parallel.ParallelRun) -> nn.Module:
    torch.manual_seed(run.rank)
    return GPT(Config(width=32, layers=2, heads=4, kv_heads=2, mlp_width=96, vocabulary=64))


def one_key_head() -> nn.Module:
    with torch.device("meta"):
        return GPT(Config(width=32, layers=2, heads=4, kv_heads=1, mlp_width=96, vocabulary=64))


CASES: dict[str, tuple[Layout, Callable[[parallel.ParallelRun], nn.Module], int]] = {
    "fused": (TENSOR, lambda _: model(attention(Fused)), 16),
    "unknown linear": (
        TENSOR,
        lambda _: model(lambda gpt: setattr(gpt.blocks[0].mlp, "mystery", nn.Linear(32, 32))),
        16,
    ),
    "another module": (TENSOR, lambda _: model(with_another_module), 16),
    "heads": (TENSOR, lambda _: one_key_head(), 16),
    "vocabulary": (
        TENSOR,
        lambda _: model(lambda gpt: setattr(gpt, "head", nn.Linear(32, 63))),
        16,
    ),
    "all heads": (TENSOR, lambda _: model(attention(lambda: AllHeads((4, 8)))), 16),
    "halved heads": (TENSOR, lambda _: model(attention(lambda: AllHeads((4, -1)))), 16),
    "by hand": (TENSOR, lambda _: model(attention(lambda: ByHand((4, -1)))), 16),
    "more than the stream": (TENSOR, lambda _: model(attention(lambda: Masked((-1, 8)))), 16),
    "experts": (TENSOR, lambda _: model(lambda gpt: setattr(gpt.blocks[0], "mlp", Experts())), 16),
    "no experts": (Layout(data=2, expert=2), lambda _: meta_model(), 16),
    "experts and tensor": (TENSOR, lambda _: meta_model("mixture"), 16),
    "sequence": (TENSOR, lambda _: meta_model(), 15),
    "batch": (Layout(data=2, micro_batch=2), lambda _: meta_model(), 16),
    "context, sequence": (CONTEXT, lambda _: meta_model(), 18),
    "context, by hand": (CONTEXT, lambda _: model(attention(lambda: ByHand((4, -1)))), 16),
    "context, masked": (CONTEXT, lambda _: model(attention(lambda: Masked((-1, 8)))), 16),
    "context, two embeddings": (CONTEXT, lambda _: with_positions(), 16),
    "tied": (PIPELINE, lambda _: model(tied), 16),
    "two embeddings": (PIPELINE, lambda _: with_positions(), 16),
    "too many stages": (
        Layout(pipeline=2, virtual_pipeline=2),
        lambda _: model(lambda gpt: None),
        16,
    ),
    "frozen stage": (
        Layout(pipeline=2, schedule="zb-1p"),
        lambda _: model(with_a_frozen_block),
        16,
    ),
    "no blocks": (SHARDED, lambda _: nn.Linear(4, 4, device="meta"), 16),
    "not initialized": (
        SHARDED,
        lambda _: model(lambda gpt: setattr(gpt, "norm", Uninitialized(32))),
        16,
    ),
    "not initialized on one stage": (
        PIPELINE,
        lambda _: model(lambda gpt: setattr(gpt, "norm", Uninitialized(32))),
        16,
    ),
    "integer buffer": (
        Layout(data=2),
        lambda _: model(lambda gpt: setattr(gpt, "positions", Positions())),
        16,
    ),
    "different weights": (SHARDED, different, 16),
}


def refusal(run: parallel.ParallelRun, made: nn.Module, length: int) -> str:
    """The reason, or an empty string."""
    try:
        placed = run.parallelize(made, loss=cross_entropy, init=first_weights)
        size = 3 if run.layout.micro_batch == 2 else BATCH // run.data_size
        tokens = torch.zeros(size, length, dtype=torch.long)
        placed.gradients(tokens, tokens)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def main() -> None:
    report = {}
    with parallel.init() as first:
        for name, (layout, make, length) in CASES.items():
            run = parallel.init(None, layout, parallel.Training(global_batch=BATCH))
            report[name] = refusal(run, make(run), length)
    Path(sys.argv[1], f"{first.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
