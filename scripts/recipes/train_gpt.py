#!/usr/bin/env python3
"""Trains a Llama-like language model on bytes, under every strategy of dtrain.

    python train_gpt.py                          one process, no launcher
        torchrun --nproc-per-node 2 train_gpt.py     ddp, or another strategy with --strategy
        dtrain launch CLUSTER.yaml                   job.strategy and job.layout

The loop is the same for every strategy: change one word in the cluster file. By default it learns
Python from the source of Python's standard library, which every machine has. A run that ended
early, or was killed, resumes from the newest checkpoint in --checkpoint when it is started again,
in the same layout or another.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone gives it
from torch import Tensor, nn

from dtrain.runtime import learning_rate, progress
from dtrain.runtime import torch as parallel
from dtrain.runtime.torch import checkpoint

TEXT = {".md", ".py", ".rst", ".txt"}
ROWS = {".jsonl", ".parquet", ".arrow"}
HELD_OUT = 0.05
"""The last part of every file, never trained on."""
BASE_BATCH = 32
"""The global batch for which --lr is meant."""


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp_width: int
    vocabulary: int
    experts: int = 0
    """In each layer, instead of one MLP; 0 for none."""
    active: int = 2
    """Experts for each token."""


class Attention(nn.Module):
    """Causal attention with rotary positions (arXiv 2104.09864) and grouped keys and values
    (arXiv 2305.13245)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.width // config.heads
        keys = config.kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, keys, bias=False)
        self.v_proj = nn.Linear(config.width, keys, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # -1 heads instead of config.heads: a tensor-parallel rank has only its share of them.
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = (part.transpose(1, 2) for part in (rotate(q), rotate(k), v))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def rotate(heads: Tensor) -> Tensor:
    """Rotate pairs of features by an angle that grows with the position.

    ``heads`` has the shape (batch, sequence, heads, head_dim). With this memory order, attention's
    output needs no copy.
    """
    size = heads.shape[-1]
    rates = 10000.0 ** -(torch.arange(0, size, 2, device=heads.device) / size)
    # Under context parallelism, a rank has only some positions of each sequence.
    angles = parallel.positions(heads.shape[1], heads.device)[:, None, None] * rates
    cos, sin = angles.cos(), angles.sin()
    one, two = heads.float().chunk(2, dim=-1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1).to(heads.dtype)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.mlp_width, bias=False)
        self.up_proj = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down_proj = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention, then an MLP or a mixture of experts, each with a residual connection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = (
            parallel.MixtureOfExperts(
                config.width, [MLP(config) for _ in range(config.experts)], config.active
            )
            if config.experts
            else MLP(config)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Predicts the next byte from earlier bytes: (batch, sequence) to (.., vocabulary)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def first_weights(name: str, module: nn.Module) -> None:
    """Small normal weights; smaller in the output layer, to start from a uniform guess."""
    if isinstance(module, nn.Embedding | nn.Linear):
        nn.init.normal_(module.weight, std=0.002 if name == "head" else 0.02)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all bytes, in nats; a uniform guess has ln 256 = 5.55."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Windows:
    """A text cut into sequences: inputs, and targets shifted by one byte, of length (context,)."""

    def __init__(self, text: bytes | bytearray, context: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


def read(data: Path | None, context: int) -> tuple[Windows, Windows]:
    """The training text, and the held-out end of every document."""
    train, held_out = bytearray(), bytearray()
    for document in documents(data):
        cut = int(len(document) * (1 - HELD_OUT))
        train += document[:cut]
        held_out += document[cut:]
    return Windows(train, context), Windows(held_out, context)


def documents(data: Path | None) -> Iterator[bytes]:
    """Text files, and the column ``text`` of rows of JSON, Parquet or Arrow, in a fixed order."""
    root = data or Path(sysconfig.get_path("stdlib"))
    skip = set() if data else {"site-packages", "dist-packages", "test", "tests"}
    found = sorted(root.rglob("*")) if root.is_dir() else [root]
    files = [
        path
        for path in found
        if path == root
        or (path.suffix in TEXT | ROWS and path.is_file()
            and not skip & set(path.relative_to(root).parts))
    ]  # fmt: skip
    if not files:
        known = ", ".join(sorted(TEXT | ROWS))
        raise SystemExit(f"error: no {known} files under {root}\nhint: pass others with --data")
    for path in files:
        if path.suffix in ROWS:
            yield from (text.encode() for text in texts(path))
        else:
            yield path.read_bytes()


def texts(path: Path) -> Iterator[str]:
    """The column ``text`` of one file of a Hugging Face data set."""
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            yield from (json.loads(line)["text"] for line in lines)
        return
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise SystemExit(f"error: {path} needs pyarrow\nhint: pip install pyarrow") from None
    if path.suffix == ".parquet":
        table = pq.read_table(path, columns=["text"])
    else:
        table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    yield from table["text"].to_pylist()


def train(run: parallel.ParallelRun, arguments: argparse.Namespace) -> None:
    context = run.training.seq_len or arguments.context
    config = Config(
        arguments.width,
        arguments.layers,
        arguments.heads,
        arguments.kv_heads,
        # A gated MLP has three matrices instead of two, so 2/3 of the usual 4 times the width.
        arguments.mlp_width or 32 * math.ceil(8 * arguments.width / 3 / 32),
        arguments.vocabulary,
        arguments.experts,
        arguments.active,
    )
    text, unseen = read(arguments.data, context)

    with torch.device("meta"):
        model = GPT(config)
    weights = sum(parameter.numel() for parameter in model.parameters())
    gpt = run.parallelize(model, loss=cross_entropy, init=first_weights, seed=arguments.seed)
    # Adam's learning rate scales with the square root of the batch.
    peak = learning_rate.scaled(arguments.lr, run.global_batch, BASE_BATCH, "sqrt")
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
    batches = run.batches(text, seed=arguments.seed)
    held_out = run.batches(unseen, seed=arguments.seed)

    step = 0
    if arguments.checkpoint:
        step = checkpoint.restore(arguments.checkpoint, gpt, optimizer, batches)
    layout = run.layout
    run.print(
        f"{run.strategy}: {weights / 1e6:.1f}M weights in {run.precision} on {run.world_size} x"
        f" {run.device.type}, tensor {layout.tensor} x pipeline {layout.pipeline} x context"
        f" {layout.context} x data {layout.data} ({layout.sharding}), {run.global_batch} sequences"
        f" of {context} a step"
    )
    run.print(f"resumed after step {step}" if step else f"{len(text)} sequences to train on")

    losses: dict[int, float] = {}
    for inputs, targets in batches:
        if step == arguments.steps:
            break
        step += 1
        rate = learning_rate.cosine(peak, step - 1, arguments.steps, arguments.warmup)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = gpt.gradients(inputs, targets)
        norm = gpt.clip_gradients(1.0)
        gpt.step(optimizer)

        tokens = run.global_batch * context
        progress(step, total=arguments.steps, loss=loss, tokens=tokens, norm=norm)
        if arguments.losses:
            losses[step] = loss.item()
        if step == 1 or step % arguments.every == 0 or step == arguments.steps:
            run.print(f"step {step}/{arguments.steps} loss {loss.item():.4f}")
        stop = run.should_stop()
        if arguments.checkpoint and (
            stop or step == arguments.steps or step % arguments.save_every == 0
        ):
            checkpoint.save(arguments.checkpoint, step, gpt, optimizer, batches)
        if stop:
            run.print(f"SIGTERM: ends after step {step}")
            break

    if arguments.losses and run.is_first:
        arguments.losses.write_text(json.dumps(losses), encoding="utf-8")
    if step == arguments.steps:
        inputs, targets = next(iter(held_out))
        run.print(f"held-out loss {gpt.loss(inputs, targets).item():.4f}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--data",
        type=Path,
        help="a file or a folder: text, or rows with a column `text` (.jsonl; .parquet and .arrow"
        " need pyarrow)",
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32, help="sequences in a step, over all ranks")
    parser.add_argument("--context", type=int, default=128, help="bytes in a sequence")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--mlp-width", type=int, help="8/3 of --width if absent")
    parser.add_argument("--experts", type=int, default=0, help="in each layer; 0: one MLP")
    parser.add_argument("--active", type=int, default=2, help="experts for each token")
    parser.add_argument("--vocabulary", type=int, default=256, help="at least the 256 bytes")
    parser.add_argument("--lr", type=float, default=3e-3, help=f"for {BASE_BATCH} sequences a step")
    parser.add_argument("--warmup", type=int, default=10, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=10, help="steps between two reports")
    parser.add_argument("--checkpoint", type=Path, help="a folder that all hosts share")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--losses", type=Path, help="where to write the loss of each step, as JSON")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    parser.add_argument("--strategy", help="used without a cluster file")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], help="likewise")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    training = parallel.Training(global_batch=arguments.batch, precision=arguments.precision)
    with parallel.init(arguments.strategy, training=training, device=arguments.device) as run:
        train(run, arguments)


if __name__ == "__main__":
    main()
