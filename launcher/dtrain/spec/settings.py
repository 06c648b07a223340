"""Settings of a command line, such as ``job.restart.max=3``: values for one call that replace those
of a cluster file. They become part of the file's tree before the schema reads it, so that all of
its rules hold for them. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from dtrain.spec import source
from dtrain.spec.clusterfile import CLUSTER_FILE, HOMES
from dtrain.spec.problems import Problems, TextSpan, shown
from dtrain.spec.schema import SectionType
from dtrain.spec.source import Broken, Entry, Mapping, Node, Scalar
from dtrain.spec.spans import BREAK

_PART = re.compile(r'"([^"]+)"|([^".=]+)')


def compose(text: str | bytes, file: str, settings: Sequence[str]) -> tuple[Node, Problems]:
    """`source.compose` for a cluster file with settings. Each is ``KEY=VALUE``: a full key, in
    which quotes protect dots, and a value in YAML, all on one line. ``null`` removes the key; a
    later setting wins.
    """
    root, problems = source.compose(text, file, (BREAK.split(each)[0] for each in settings))
    problems.homes = HOMES
    first = len(problems.lines) - len(settings) + 1
    for line, setting in enumerate(settings, first):
        root = _set(root, setting, line, problems)
    return root, problems


def key_of(setting: str) -> tuple[str, tuple[str, ...]]:
    """The key of a setting, as it is written and in parts; empty if the text is no setting."""
    path, end = _path(setting, 1)
    return setting[: end - 1] if path else "", tuple(part.text for part in path)


def _set(root: Node, setting: str, line: int, problems: Problems) -> Node:
    path, end = _path(setting, line)
    if wrapped := BREAK.search(setting):
        problems.add(
            "a setting is one line",
            TextSpan(line, wrapped.start() + 1),
            r"""write the line break as \n in double quotes: --set 'job.env.TEXT="a\nb"'""",
        )
        return root
    if not path:
        problems.add(
            f"{shown(setting)} is not KEY=VALUE",
            TextSpan(line, 1, len(setting)),
            "write e.g. job.restart.max=3; `dtrain help keys` shows all keys",
        )
        return root
    problems.settings.add(".".join(part.text for part in path))
    value = source.compose_value(setting[end:], TextSpan(line, end + 1), problems)
    if isinstance(value, Scalar) and value.plain:
        if value.null:
            return _without(root, path) if _known(path, problems) else root
        if not value.text:
            # In a file, a section without a value has its defaults.
            key = setting[: end - 1]
            hint = (
                f'{key}=null removes the key; {{}}, [] and "" are an empty section, list and text'
            )
            problems.add(f"{key} has no value", value.place, hint)
            return root
    return _with(root, path, value)


def _path(setting: str, line: int) -> tuple[list[Scalar], int]:
    """The parts of the key, and where the value starts. No parts if there is no value."""
    path: list[Scalar] = []
    at = 0
    while part := _PART.match(setting, at):
        start, end = part.span(part.lastindex or 0)
        place = TextSpan(line, start + 1, end - start)
        path.append(Scalar(part[part.lastindex or 0], True, place, start + 1))
        at = part.end() + 1
        if setting[part.end() : at] != ".":
            break
    return (path, at) if setting[at - 1 : at] == "=" else ([], 0)


def _with(node: Node, path: Sequence[Scalar], value: Node) -> Node:
    """The tree with ``value`` at ``path``; sections on the way are made as needed."""
    if not path:
        return value
    if not isinstance(node, Mapping):
        return node
    key, *below = path
    old = _entry(node, key)
    inner: Node = Mapping((), key.place, key.place)
    if old is not None and below and isinstance(old.value, Mapping | Broken):
        key, inner = old.key, old.value
    new = Entry(key, _with(inner, below, value))
    if old is None:
        return replace(node, entries=(*node.entries, new))
    return replace(node, entries=tuple(new if one is old else one for one in node.entries))


def _without(node: Node, path: Sequence[Scalar]) -> Node:
    """The tree without the key at ``path``."""
    key, *below = path
    old = _entry(node, key)
    if not isinstance(node, Mapping) or old is None:
        return node
    left = (Entry(old.key, _without(old.value, below)),) if below else ()
    return replace(
        node,
        entries=tuple(entry for one in node.entries for entry in (left if one is old else (one,))),
    )


def _entry(node: Node, key: Scalar) -> Entry | None:
    entries = node.entries if isinstance(node, Mapping) else ()
    return next((entry for entry in entries if entry.key.text == key.text), None)


def _known(path: Sequence[Scalar], problems: Problems) -> bool:
    """Whether there is such a key; if not, reports it. The tree cannot show that a removed key is
    misspelled."""
    name = ""
    kind: object = CLUSTER_FILE
    for key in path:
        if not isinstance(kind, SectionType):
            break
        if key.text not in kind.fields:
            kind.refuse_unknown(key, problems, name)
            return False
        kind = kind.fields[key.text].type
        name = f"{name}.{key.text}" if name else key.text
    return True
