"""Host lists in a cluster file: names with their positions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from dtrain.hostlist import MAX_HOSTS, HostListError, unfold
from dtrain.records import dataclass
from dtrain.spec import source
from dtrain.spec.problems import Problems, TextSpan, shown, visible
from dtrain.spec.scalars import JsonSchema, Type
from dtrain.spec.schema import Section, SectionType, short
from dtrain.spec.source import Node, Scalar

_LOGIN = re.compile(r"\A(?:[^@]*@)?([^:@]+)(?::[0-9]+)?\Z")
"""A host as `ssh` takes it, perhaps with a user and a port. No IPv6 address matches."""
_WRONG_CHARACTER = re.compile(r"[^A-Za-z0-9._:-]")

_EMPTY = "name the machines, such as gpu[01-08]; this machine is localhost, with 'transport: local'"


@dataclass(frozen=True, slots=True)
class Named:
    """A host name and the position of the text that it comes from, such as ``gpu[01-08]``."""

    name: str
    place: TextSpan


@dataclass(frozen=True)
class HostList(Type[tuple[Named, ...]]):
    """Hosts in order: one host list as text, or several in a list."""

    needed: bool = False
    """Whether the list must not be empty."""
    expects: str = "a host list such as gpu[01-08,11]"

    def read(self, node: Node, problems: Problems, name: str) -> tuple[Named, ...] | None:
        if isinstance(node, source.Sequence):
            if self.needed and not node.items:
                problems.add(f"{name} cannot be empty", node.place, _EMPTY)
                return None
            return _names(node.items, problems, name)
        if isinstance(node, Scalar) and node.empty and not self.needed:
            return ()
        if not isinstance(node, Scalar) or node.empty:
            return self.refuse(node, problems, name, _EMPTY if self.needed else "")
        return _names([node], problems, name)

    def json_schema(self) -> JsonSchema:
        one = {"type": ["string", "number"]}
        several: JsonSchema = {"type": "array", "items": one}
        return {"anyOf": [one, several | {"minItems": 1} if self.needed else several]}


@dataclass(frozen=True)
class Overrides(Type[tuple[tuple[Named, Section], ...]]):
    """Settings of hosts. A key is a host name, or a host list whose hosts share the settings."""

    settings: SectionType
    expects: str = "hosts with their settings"

    def read(
        self, node: Node, problems: Problems, name: str
    ) -> tuple[tuple[Named, Section], ...] | None:
        if isinstance(node, Scalar) and node.empty:
            return ()
        if not isinstance(node, source.Mapping):
            return self.refuse(node, problems, name)
        found: list[tuple[Named, Section]] = []
        for entry in node.entries:
            names = _names([entry.key], problems, name, MAX_HOSTS - len(found))
            section = self.settings.read(entry.value, problems, f"{name}.{short(entry.key.text)}")
            if names and section:
                found.extend((named, section) for named in names)
        return tuple(found)

    def json_schema(self) -> JsonSchema:
        return {"type": ["object", "null"], "additionalProperties": self.settings.json_schema()}


def _names(
    texts: Iterable[Node], problems: Problems, name: str, limit: int = MAX_HOSTS
) -> tuple[Named, ...] | None:
    """The hosts that the texts expand to. Reports each text that is not a host list, and returns
    None if there is one: the other hosts alone may contradict the rest of the file. A host with a
    wrong name is reported and counts as a host."""
    found: list[Named] = []
    sound = True
    for text in texts:
        if not isinstance(text, Scalar) or text.empty:
            HostList().refuse(text, problems, name)
            sound = False
            continue
        try:
            names = unfold(text.text, limit=limit - len(found))
        except HostListError as error:
            # The limit is for all texts together; the message has what is left of it for this one.
            message = re.sub(r"more than \d+ hosts", f"more than {limit} hosts", error.message)
            hint = error.hint
            if re.search(r"\[[^]]*:", text.text):
                hint = "write an IPv6 address without brackets"
            offset = min(error.offset, max(len(text.text) - 1, 0))
            problems.add(f"{name}: {message}", text.part(offset, error.width), hint)
            sound = False
            continue
        _check(names, text, problems, name)
        found.extend(Named(_LOGIN.sub(r"\1", host), text.place) for host in names)
    return tuple(found) if sound else None


def _check(names: Sequence[str], text: Scalar, problems: Problems, name: str) -> None:
    """Report the first that is not a host name."""
    for host in names:
        wrong, hint = host_name_fault(host)
        if wrong:
            problems.add(f"{name}: the host name {shown(host)} {wrong}", text.place, hint)
            return


def host_name_fault(name: str) -> tuple[str, str]:
    """What is wrong with a host name or address, as the end of a sentence, and a hint.

    Both are empty for a valid name. Names become folder names and command arguments, so only the
    characters of DNS names and IP addresses are valid.
    """
    if "@" in name:
        return "contains a user", "set the user in cluster.ssh.user, or for one host in overrides"
    if re.fullmatch(r"[^:]+:[0-9]+", name):
        return "contains a port", "set the port in cluster.ssh.port, or for one host in overrides"
    wrong = _WRONG_CHARACTER.search(name)
    if wrong:
        return (
            f"cannot contain '{visible(wrong[0])}'",
            "write a range in brackets: gpu[01-08]"
            if wrong[0] in "{}"
            else "host names consist of letters, digits, '.', '_', ':' and '-'",
        )
    if name.startswith("-"):
        return "cannot start with '-'", ""
    if name in (".", ".."):
        return "is not a name", ""
    return "", ""
