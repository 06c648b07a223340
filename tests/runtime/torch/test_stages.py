"""A pipeline's stages hold each part once, under its own name, and compute the whole model."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from dtrain.runtime.layout import Layout
from dtrain.runtime.torch.anatomy import Anatomy, dissect
from dtrain.runtime.torch.pipeline import (
    owners_of_stages,
    parts_of_stages,
    refuse_what_cannot_be_staged,
    stages_of_rank,
    take_stage,
)

pytestmark = pytest.mark.torch


class Inner(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed_tokens(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Nested(nn.Module):
    """Named as Hugging Face's models are."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.model = Inner(layers)
        self.lm_head = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.model(x))


def test_the_parts_of_a_nested_model() -> None:
    assert dissect(Nested(2)) == Anatomy(
        ("model.embed_tokens",), ("model.layers.0", "model.layers.1"), ("model.norm", "lm_head")
    )


def test_blocks_left_over_go_to_the_middle() -> None:
    anatomy = Anatomy(("embedding",), tuple(f"b{n}" for n in range(7)), ("norm", "head"))
    assert parts_of_stages(anatomy, 4) == [
        ["embedding", "b0", "b1"],
        ["b2", "b3"],
        ["b4", "b5"],
        ["b6", "norm", "head"],
    ]


def test_which_rank_holds_which_stage() -> None:
    interleaved = Layout(pipeline=2, virtual_pipeline=2)
    assert [stages_of_rank(interleaved, rank) for rank in (0, 1)] == [[0, 2], [1, 3]]
    down_and_up = Layout(pipeline=2, virtual_pipeline=2, schedule="zb-v")
    assert [stages_of_rank(down_and_up, rank) for rank in (0, 1)] == [[0, 3], [1, 2]]
    assert owners_of_stages(down_and_up) == [0, 1, 1, 0]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_stages_after_one_another_are_the_model(count: int) -> None:
    torch.manual_seed(0)
    model = Nested()
    anatomy = dissect(model)
    stages = [take_stage(model, parts, anatomy) for parts in parts_of_stages(anatomy, count)]
    held = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(held) == sorted(name for name, _ in model.named_parameters())
    x = tokens = torch.arange(8)[None]
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, model(tokens))


def test_what_stages_would_repeat_is_refused() -> None:
    class Scaled(Inner):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    class Dropped(Nested):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.lm_head(self.dropout(self.model(x)))

    class Unpacked(Nested):
        def forward(self, x: Tensor) -> Tensor:
            _batch, _sequence = x.shape
            return super().forward(x)

    for fine in (Nested(), Dropped()):
        refuse_what_cannot_be_staged(fine, dissect(fine), {})
    scaled = Nested()
    scaled.model = Scaled(6)
    with pytest.raises(ValueError, match=re.escape("Nested.forward() computes between its")):
        refuse_what_cannot_be_staged(scaled, dissect(scaled), {})
    with pytest.raises(ValueError, match=r"needs the tokens: .* fails \(ValueError: too many"):
        refuse_what_cannot_be_staged(Unpacked(), dissect(Unpacked()), {})


def test_stages_of_one_rank_have_separate_hooks_and_buffers() -> None:
    model = Nested()
    model.model.register_buffer("table", torch.zeros(2))
    anatomy = dissect(model)
    one, other = (take_stage(model, parts, anatomy) for parts in parts_of_stages(anatomy, 2))
    one.register_forward_hook(lambda *_: None)
    one.model.table = torch.ones(2)
    assert not other._forward_hooks
    assert not model._forward_hooks
    assert not other.model.table.any()
