"""Finds a transformer's blocks and the modules around them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Names of a transformer's parts: those before its blocks, the blocks, those after.

    A part is a whole module. The modules that hold the list of blocks are not parts.
    """

    before: tuple[str, ...]
    blocks: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def around(self) -> tuple[str, ...]:
        """The parts that are not blocks."""
        return self.before + self.after


def dissect(model: nn.Module, blocks: str | None = None) -> Anatomy:
    """The parts of ``model``. ``blocks`` names its list of blocks if it has several lists.

    Raises ValueError if the blocks cannot be identified, or if a module that holds them has
    parameters of its own.
    """
    name = blocks if blocks is not None else _find_blocks(model)
    listed = model.get_submodule(name)
    before: list[str] = []
    after: list[str] = []
    path = ""
    for step in name.split("."):
        holder = model.get_submodule(path)
        if own := [key for key, _ in holder.named_parameters(recurse=False)]:
            raise ValueError(
                f"{type(holder).__name__} holds the blocks and has a parameter of its own,"
                f" {own[0]!r}; put it into a module, so that it can be split and sharded"
            )
        names = [key for key, _ in holder.named_children()]
        here = [".".join(filter(None, (path, key))) for key in names]
        before += here[: names.index(step)]
        # A holder's later parts come before the parts after that holder.
        after = here[names.index(step) + 1 :] + after
        path = ".".join(filter(None, (path, step)))
    inside = tuple(f"{name}.{key}" for key, _ in listed.named_children())
    return Anatomy(tuple(before), inside, tuple(after))


def _find_blocks(model: nn.Module) -> str:
    lists: list[str] = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters())
    ]
    outer = [
        name
        for name in lists
        if not any(name != other and name.startswith(f"{other}.") for other in lists)
    ]
    if len(outer) != 1:
        found = f"it has {', '.join(outer)}" if outer else "it has none"
        raise ValueError(
            f"{type(model).__name__} should keep its blocks in one nn.ModuleList, and {found};"
            ' name the list: parallelize(model, ..., blocks="layers")'
        )
    return outer[0]
