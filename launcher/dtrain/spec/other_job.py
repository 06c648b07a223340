"""The text of a cluster file with another job on the same hosts. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from dtrain.spec.source import Mapping as MappingNode
from dtrain.spec.source import Node, Scalar, Sequence, compose

_NOT_TEXT = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null|~|")
"""Plain scalars that mean the same in JSON. A schema reads all others as text, in quotes or not."""


def with_job(text: str, job: Mapping[str, Any], *, keep: Collection[str], name: str) -> str:
    """Return a file with the ``cluster`` of ``text``, a valid cluster file, and the ``job``.

    ``keep`` are keys of the job of ``text`` that stay. The result is JSON, which is YAML.
    """
    root, _ = compose(text.encode(errors="surrogateescape"), name)
    cluster, old = _entry(root, "cluster"), _entry(root, "job")
    kept = [f"{json.dumps(key)}: {_json(_entry(old, key))}" for key in keep if _has(old, key)]
    keys = [*kept, *(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in job.items())]
    return (
        f'{{"name": {json.dumps(name)},\n"cluster": {_json(cluster)},\n'
        f'"job": {{{", ".join(keys)}}}}}\n'
    )


def _has(node: Node, key: str) -> bool:
    return isinstance(node, MappingNode) and any(one.key.text == key for one in node.entries)


def _entry(node: Node, key: str) -> Node:
    assert isinstance(node, MappingNode)  # noqa: S101 - the file is valid
    return next(one.value for one in node.entries if one.key.text == key)


def _json(node: Node) -> str:
    if isinstance(node, MappingNode):
        pairs = (f"{json.dumps(one.key.text)}: {_json(one.value)}" for one in node.entries)
        return f"{{{', '.join(pairs)}}}"
    if isinstance(node, Sequence):
        return f"[{', '.join(map(_json, node.items))}]"
    assert isinstance(node, Scalar)  # noqa: S101 - the file is valid
    if node.plain and _NOT_TEXT.fullmatch(node.text):
        return node.text or "null"
    return json.dumps(node.text)
