"""Which names ssh's configuration treats alike, so that one ``ssh -G`` answers for all of them.

One query takes 5 ms. Names that match the same patterns of `Host` lines get the same
options, as long as nothing else in the configuration depends on the name. In doubt, a name is like
no other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from dtrain.records import dataclass

OptionValues = Mapping[str, tuple[str, ...]]
"""What ``ssh -G`` prints, by keyword."""

# A quote within a keyword and a zero byte, where ssh's line ends, are left to ssh.
_LINE = re.compile(r"[\s=]*(?:#[^\0]*|(\w*)(?:[\s=]+([^\0]*))?)")
_QUOTES = re.compile(r"[\"'\\]")
# ssh may print addresses and capital letters differently.
_PLAIN = re.compile(r"[a-z][a-z0-9.-]*")


@dataclass(frozen=True, slots=True)
class HostPatterns:
    """The patterns of `Host` lines."""

    names: frozenset[str]
    """Patterns without wildcards, and the names that `HostName` lines set."""
    wildcards: tuple[str, ...]

    def matched(self, name: str) -> tuple[bool, ...] | None:
        """Which wildcards match a name: other names with the same ones are treated alike. None if
        the name is like no other."""
        if name in self.names or not _PLAIN.fullmatch(name):
            return None
        return tuple(fnmatchcase(name, wildcard) for wildcard in self.wildcards)


def patterns(configs: Iterable[str]) -> HostPatterns | None:
    """The patterns in the texts of all configuration files that ssh has read. None if names that
    match the same ones may get different options."""
    found: dict[str, None] = {}
    for line in (line for text in configs for line in text.split("\n")):
        match = _LINE.fullmatch(line)
        if match is None:
            return None
        keyword, rest = (match[1] or "").lower(), match[2] or ""
        if keyword in {"host", "hostname"}:
            found.update(dict.fromkeys(rest.lower().replace("=", " ").split()))
        # `%C` is a hash of the name. Other tokens show it, and `renamed` sees it.
        token = "%" if keyword in {"include", "hostname"} else "%C"
        has_token = token in _QUOTES.sub("", rest)
        if keyword == "match" or keyword.startswith("canonical") or (keyword and has_token):
            return None
    if any(map(_QUOTES.search, found)):
        return None
    wild = {pattern for pattern in found if set(pattern) & set("*?")}
    return HostPatterns(
        names=frozenset(pattern.lstrip("!") for pattern in found.keys() - wild),
        # Brackets have no meaning to ssh.
        wildcards=tuple(
            pattern.lstrip("!").replace("[", "[[]") for pattern in found if pattern in wild
        ),
    )


def renamed(values: OptionValues, name: str, other: str) -> OptionValues | None:
    """The options of the name ``other``, from those of a name that is treated alike. None if
    another option contains one of the names: a jump host must not be its own."""
    found: dict[str, tuple[str, ...]] = {}
    for keyword, lines in values.items():
        if keyword in {"host", "hostname"} and lines == (name,):
            found[keyword] = (other,)
        elif any(name in line or other in line for line in lines):
            return None
        else:
            found[keyword] = lines
    return found
