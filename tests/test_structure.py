"""The structure of the product's code. Pure: it reads the sources as text."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULE, CLASS = 500, 300
"""Most lines of a module and of a class."""


@cache
def sources() -> dict[str, str]:
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for folder in ("cli", "launcher", "scripts")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def test_modules_are_short() -> None:
    lengths = {place: source.count("\n") for place, source in sources().items()}
    assert {place: length for place, length in lengths.items() if length > MODULE} == {}


def test_classes_are_short() -> None:
    long = {
        f"{place}: {node.name}": node.end_lineno - node.lineno + 1
        for place, source in sources().items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.end_lineno is not None
        if node.end_lineno - node.lineno >= CLASS
    }
    assert long == {}


def test_a_public_type_has_one_meaning() -> None:
    """Classes, and aliases of types, which are named like classes."""
    places = defaultdict(list)
    for place, source in sources().items():
        if place.startswith("scripts/"):
            continue
        for node in ast.parse(source).body:
            for name in _types(node):
                places[name].append(place)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def _types(node: ast.stmt) -> list[str]:
    names: list[str] = []
    if isinstance(node, ast.ClassDef):
        names = [node.name]
    elif isinstance(node, ast.Assign):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        names = [node.target.id]
    return [name for name in names if name[0].isupper() and not name.isupper()]
