"""The text of a cluster file with another job on the same hosts. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dtrain.spec.settings import compose
from dtrain.spec.source import Mapping as MappingNode
from dtrain.spec.source import Node, Scalar
from dtrain.spec.source import Sequence as SequenceNode

_NOT_TEXT = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|true|false|null|~|")
"""Plain scalars that are no text. A schema reads all others as text, in quotes or not."""


def with_job(
    text: str, settings: Sequence[str], job: Mapping[str, Any], *, keep: Collection[str], name: str
) -> str:
    """Return a file with the ``cluster`` of ``text``, a valid cluster file with ``settings``, and
    the ``job``.

    ``keep`` are keys of the job of ``text`` that stay. The result is YAML in JSON's style.
    """
    root, _ = compose(text.encode(errors="surrogateescape"), name, settings)
    file = _values(root)
    old = _values(file["job"])
    kept = [f"{_quoted(key)}: {_json(old[key])}" for key in keep if key in old]
    keys = [*kept, *(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in job.items())]
    return (
        f'{{"name": {_quoted(name)},\n"cluster": {_json(file["cluster"])},\n'
        f'"job": {{{", ".join(keys)}}}}}\n'
    )


def _values(node: Node) -> dict[str, Node]:
    """The values of a mapping by their keys, without empty ones: a section may be empty."""
    assert isinstance(node, MappingNode)  # noqa: S101 - the file is valid
    entries = ((one.key.text, one.value) for one in node.entries)
    return {key: one for key, one in entries if not (isinstance(one, Scalar) and one.empty)}


def _json(node: Node) -> str:
    if isinstance(node, MappingNode):
        pairs = (f"{_quoted(key)}: {_json(value)}" for key, value in _values(node).items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(node, SequenceNode):
        return f"[{', '.join(map(_json, node.items))}]"
    assert isinstance(node, Scalar)  # noqa: S101 - the file is valid
    if node.plain and _NOT_TEXT.fullmatch(node.text):
        return node.text or "null"
    return _quoted(node.text)


def _quoted(text: str) -> str:
    """``text`` in double quotes. JSON's pairs of surrogates are two characters in YAML."""
    escaped = (char if ord(char) > 0xFFFF else json.dumps(char)[1:-1] for char in text)
    return f'"{"".join(escaped)}"'
