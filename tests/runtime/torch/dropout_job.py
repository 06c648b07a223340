"""One rank that trains a model with dropout, and prints the mask of each call in each step.

    dropout_job.py LAYOUT.json CHECKPOINTS STEPS

Saves a checkpoint after the first step, and resumes from it.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.runtime import torch as parallel
from dtrain.runtime.torch import checkpoint

WIDTH, CONTEXT, VOCABULARY = 16, 8, 32
MASKS: dict[str, list[str]] = {}


class Mask(nn.Module):
    """Dropout that records which features of the first sample it drops."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones_like(x), 0.5, self.training)
        if self.training:
            kept = "".join(map(str, mask[0].flatten().gt(0).int().tolist()))
            MASKS.setdefault(self.place, []).append(kept)
        return x * mask


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.inside = Mask("inside")
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.stream = Mask("stream")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.stream(self.down(self.inside(F.gelu(self.up(self.norm(x))))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = Mask("embedding")
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    layout, folder, steps = parallel.Layout(**json.loads(sys.argv[1])), sys.argv[2], sys.argv[3]
    run = parallel.init(None, layout, parallel.Training(global_batch=layout.global_batch))
    with run:
        with torch.device("meta"):
            model = Model()
        trained = run.parallelize(model, loss=loss, seed=3)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        tokens = torch.arange(layout.global_batch * CONTEXT).view(-1, CONTEXT) % VOCABULARY
        mine = tokens.chunk(run.data_size)[run.data_rank]
        found = []
        start = checkpoint.restore(folder, trained, optimizer)
        for step in range(start + 1, int(steps) + 1):
            MASKS.clear()
            trained.gradients(mine, mine)
            between = torch.rand(()).item()
            trained.step(optimizer)
            found.append({**MASKS, "between": [str(between)]})
            if step == 1:
                checkpoint.save(folder, step, trained, optimizer)
        print(json.dumps(found))


main()
