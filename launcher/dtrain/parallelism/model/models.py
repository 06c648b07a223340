"""Shapes of well-known models, with their published numbers of parameters.

The figures are in ``models.json``. ``seq_len`` is the length in most of the pretraining, which
for recent models is far below their longest context.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from dtrain.parallelism.model.shape import Shape
from dtrain.parallelism.names import find, index
from dtrain.records import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """A published model."""

    shape: Shape
    parameters: int
    """Parameters as published; exact if ``source`` is the weights."""
    active: int
    """Active parameters for one token as published; 0 for dense models, or if not published."""
    source: str
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.shape.name


@cache
def models() -> tuple[Model, ...]:
    """Return all models of the table."""
    import json  # takes 7 ms, needed only for plans by model name

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
    """Return the shape of a well-known model; the name may have its owner's prefix
    (``meta-llama/``).

    Raises:
        UsageError: no model has this name; suggests the nearest.
    """
    return find(
        name.rpartition("/")[2],
        index((known.name, known.aliases, known.shape) for known in models()),
        [known.name for known in models()],
        what="model",
        otherwise="Give its Hugging Face file with `model_config`, or a size with `model_size`",
    )
