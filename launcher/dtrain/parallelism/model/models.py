"""Shapes of well-known models, each with its published number of parameters.

The figures are data: ``models.json``. ``seq_len`` is what most of the pretraining used, which
for recent models is far below the longest context that they accept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dtrain.parallelism.model.shape import Shape
from dtrain.parallelism.names import find, index


@dataclass(frozen=True, slots=True)
class Model:
    """A model that someone published."""

    shape: Shape
    parameters: int
    """As published; exact where ``source`` is its weights."""
    active: int
    """Those of one token, as published; 0 for a dense model, or where they are not."""
    source: str
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.shape.name


@cache
def models() -> tuple[Model, ...]:
    """All models of the table."""
    import json  # 7 ms that only plans by a model's name need pay

    entries = json.loads(Path(__file__).with_name("models.json").read_text("utf-8"))
    found = []
    for entry in entries:
        parameters, active = entry.pop("parameters"), entry.pop("active", 0)
        source, aliases = entry.pop("source"), tuple(entry.pop("aliases", ()))
        shape = Shape(
            kv_heads=entry.pop("kv_heads", entry["heads"]),
            head_size=entry.pop("head_size", entry["hidden"] // entry["heads"]),
            **entry,
        )
        found.append(Model(shape, parameters, active, source, aliases))
    return tuple(found)


def model(name: str) -> Shape:
    """The shape of a well-known model; its owner's prefix (``meta-llama/``) may stand before.

    Raises:
        UsageError: the table has none of that name; suggests the nearest.
    """
    return find(
        name.rpartition("/")[2],
        index((known.name, known.aliases, known.shape) for known in models()),
        [known.name for known in models()],
        what="model",
        otherwise="Give its Hugging Face file with --model-config, or a size with --model-size",
    )
