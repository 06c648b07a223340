"""Shapes of well-known models, with their published numbers of parameters.

The figures are in ``models.json``: the sizes of a `Shape`, or as ``config`` the keys of a
``config.json``. ``seq_len`` is the length in most of the pretraining, which for recent models is
far below their longest context.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from dtrain.parallelism.model.huggingface import shape_from_config
from dtrain.parallelism.model.shape import Shape
from dtrain.parallelism.names import find, index


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
        name, config = entry["name"], entry.pop("config", None)
        parameters, active = entry.pop("parameters"), entry.pop("active", 0)
        source, aliases = entry.pop("source"), tuple(entry.pop("aliases", ()))
        if config is not None:
            found.append(_described(name, config, parameters, active, source, aliases))
            continue
        shape = Shape(
            kv_heads=entry.pop("kv_heads", entry["heads"]),
            head_size=entry.pop("head_size", entry["hidden"] // entry["heads"]),
            **entry,
        )
        found.append(Model(shape, parameters, active, source, aliases))
    return tuple(found)


def _described(
    name: str,
    config: dict[str, object],
    parameters: int,
    active: int,
    source: str,
    aliases: tuple[str, ...],
) -> Model:
    """Return a model that its Hugging Face file describes best: its layers differ."""
    import json

    shape = replace(shape_from_config(json.dumps(config), name), name=name)
    return Model(shape, parameters, active, source, aliases)


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
