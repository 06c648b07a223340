"""Shapes of well-known models, with their published numbers of parameters.

The figures are in ``models.json``: the sizes of a `Shape`, or as ``config`` the keys of a
``config.json``. ``seq_len`` is the length in most of the pretraining, which for recent models is
far below their longest context.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from dtrain.parallelism.model.shape import Shape
from dtrain.parallelism.names import find
from dtrain.records import dataclass

_FURTHER_TRAINING = {
    "base", "chat", "coder", "deduped", "hf", "instruct", "it", "math", "pt", "thinking",
}  # fmt: skip
"""Words of repositories' names for models of the same shape."""


@dataclass(frozen=True)
class Model:
    """A published model."""

    name: str
    parameters: int
    """Parameters as published; exact if ``source`` is the weights."""
    active: int
    """Active parameters for one token as published; 0 for dense models, or if not published."""
    source: str
    aliases: tuple[str, ...]
    sizes: Mapping[str, Any]
    """The sizes of its shape, or a ``config`` that describes it better: its layers differ."""

    @cached_property
    def shape(self) -> Shape:
        sizes = dict(self.sizes)
        if "config" in sizes:
            from dtrain.parallelism.model.huggingface import shape_from_values

            return replace(shape_from_values(sizes["config"], self.name), name=self.name)
        return Shape(
            name=self.name,
            kv_heads=sizes.pop("kv_heads", sizes["heads"]),
            head_size=sizes.pop("head_size", sizes["hidden"] // sizes["heads"]),
            **sizes,
        )


@cache
def models() -> tuple[Model, ...]:
    """Return all models of the table."""
    import json  # takes 7 ms, needed only for plans by model name

    entries = json.loads(Path(__file__).with_name("models.json").read_text("utf-8"))
    return tuple(
        Model(
            entry.pop("name"),
            entry.pop("parameters"),
            entry.pop("active", 0),
            entry.pop("source"),
            tuple(entry.pop("aliases", ())),
            entry,
        )
        for entry in entries
    )


def _shorter(name: str) -> Iterator[str]:
    """Yield a repository's name without words for further training; then without versions and
    dates, too, if it still has a size (models of other dates may have another)."""
    words = [word for word in re.split("[-_ ]", name) if word.lower() not in _FURTHER_TRAINING]
    yield "-".join(words)
    undated = [word for word in words if not re.fullmatch(r"v\d[\d.]*|\d{4}", word.lower())]
    if any(re.fullmatch(r"[\d.x]+[bm]", word.lower()) for word in undated):
        yield "-".join(undated)


def model(name: str) -> Shape:
    """Return the shape of a well-known model; the name may be that of a repository of it, or of a
    fine-tuned one (``meta-llama/Llama-3.1-8B-Instruct``).

    Raises:
        UsageError: no model has this name; suggests the nearest.
    """
    written = name.rpartition("/")[2]
    otherwise = (
        "Give its Hugging Face file with `model_config`, or a size with `model_size`; "
        "'dtrain help models' lists those it knows"
    )
    return find((written, *_shorter(written)), models(), "model", otherwise).shape
