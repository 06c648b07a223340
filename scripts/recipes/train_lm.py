#!/usr/bin/env python3
"""Trains a small byte-level transformer language model with DistributedDataParallel.

    python train_lm.py                          one process, no launcher
    dtrain launch configs/local.yaml            two nodes of two workers on this machine
    torchrun --nproc-per-node 2 train_lm.py

It reads the variables that every launcher of torch sets (RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT). It does not need dtrain, but reports its steps to it.
By default it learns Python from the source of Python's standard library, which every machine has.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist

# The functions of this module keep the process group that exists when it is loaded. By default,
# torch loads it at the first use of DistributedDataParallel. Loaded before there is a group,
# nothing outlives destroy_process_group. Otherwise gloo's threads do, and a thread that frees the
# last tensor while Python exits aborts the process ("terminate called without an active
# exception").
import torch.distributed.nn
import torch.nn.functional as F  # noqa: N812 - the name everyone gives it
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

try:
    from dtrain.runtime import progress
except ModuleNotFoundError:  # another launcher
    progress = None

TEXT = {".md", ".py", ".rst", ".txt"}
HELD_OUT = 0.05
"""The last part of every file, never trained on."""


def corpus_files(corpus: Path | None) -> list[Path]:
    """The training files, in the same order on every rank."""
    if corpus is not None and corpus.is_file():
        return [corpus]
    root = corpus or Path(sysconfig.get_path("stdlib"))
    skip = set() if corpus else {"site-packages", "dist-packages", "test", "tests"}
    files = [
        path
        for path in sorted(root.rglob("*"))
        if path.suffix in TEXT and path.is_file() and not skip & set(path.relative_to(root).parts)
    ]
    if not files:
        raise SystemExit(
            f"no {', '.join(sorted(TEXT))} files under {root}: pass others with --corpus"
        )
    return files


def read_shard(files: list[Path], rank: int, world: int, *, held_out: bool) -> Tensor:
    """This rank's share of every file, as one row of bytes. Shares do not overlap."""
    shard = bytearray()
    for path in files:
        size = path.stat().st_size
        cut = int(size * (1 - HELD_OUT))
        start, length = (cut, size - cut) if held_out else (0, cut)
        with path.open("rb") as file:
            file.seek(start + length * rank // world)
            shard += file.read(length * (rank + 1) // world - length * rank // world)
    return torch.frombuffer(shard, dtype=torch.uint8)


def batch(shard: Tensor, size: int, context: int, generator: torch.Generator) -> Tensor:
    """Random windows: byte values of shape (size, context + 1)."""
    if len(shard) <= context:
        raise SystemExit(f"the corpus leaves {len(shard)} bytes for this rank: too few")
    starts = torch.randint(len(shard) - context, (size, 1), generator=generator)
    return shard[starts + torch.arange(context + 1)].long()


class Block(nn.Module):
    """Attention, then a feed-forward layer, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                 for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)]  # fmt: skip
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """Predicts the next byte from earlier bytes."""

    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.bytes(tokens) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte; a uniform guess has ln 256 = 5.55."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, shard: Tensor, arguments: argparse.Namespace) -> float:
    """Loss on text that no rank trained on, averaged over all ranks."""
    generator = torch.Generator().manual_seed(0)
    tokens = batch(shard, 4 * arguments.batch, arguments.context, generator)
    loss = loss_of(model, tokens.to(next(model.parameters()).device))
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    files = corpus_files(arguments.corpus)
    shard = read_shard(files, rank, world, held_out=False)
    unseen = read_shard(files, rank, world, held_out=True)

    torch.manual_seed(arguments.seed)
    model = LanguageModel(arguments.context, arguments.width, arguments.layers, arguments.heads)
    model.to(device)
    ddp = DistributedDataParallel(
        model, device_ids=[device.index] if device.index is not None else None
    )
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=arguments.lr)
    warm_up = max(1, arguments.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            (step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * step / arguments.steps)
        ),
    )

    weights = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"rank {rank} of {world} on {device}: {weights / 1e6:.1f}M weights,"
        f" {len(shard) / 1e6:.1f} MB of text from {len(files)} files"
    )
    before = held_out_loss(model, unseen, arguments)
    if rank == 0:
        print(f"held-out loss before training {before:.2f}")

    # Ranks draw from different shards, in an order that the seed determines.
    generator = torch.Generator().manual_seed(arguments.seed + rank)
    since, steps_since, loss_since = time.perf_counter(), 0, 0.0
    for step in range(1, arguments.steps + 1):
        tokens = batch(shard, arguments.batch, arguments.context, generator).to(device)
        loss = loss_of(ddp, tokens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if progress is not None:
            tokens_of_all = world * arguments.batch * arguments.context
            progress(step, total=arguments.steps, loss=loss, tokens=tokens_of_all)
        steps_since += 1
        loss_since += loss.item()
        if step == 1 or step % arguments.every == 0 or step == arguments.steps:
            now = time.perf_counter()
            rate = steps_since * arguments.batch * arguments.context / (now - since) / 1000
            mean = loss_since / steps_since
            print(f"step {step}/{arguments.steps} mean loss {mean:.2f} {rate:.1f}k tokens/s")
            since, steps_since, loss_since = now, 0, 0.0

    after = held_out_loss(model, unseen, arguments)
    if rank == 0:
        print(f"held-out loss after training {after:.2f} (before {before:.2f})")
        if arguments.save:
            arguments.save.parent.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), arguments.save)
            print(f"saved {arguments.save}")


def choose_device(name: str) -> torch.device:
    """``auto`` gives each rank of a node its own GPU if there are enough, else the CPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "auto":
        name = "cuda" if torch.cuda.device_count() > local_rank else "cpu"
    if name == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    return torch.device(name)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--corpus", type=Path, help="a file or a folder of text")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=8, help="sequences on each rank")
    parser.add_argument("--context", type=int, default=128, help="bytes in a sequence")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=20, help="steps between two reports")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--save", type=Path, help="file for the weights, written by rank 0")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    device = choose_device(arguments.device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        train(arguments, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
