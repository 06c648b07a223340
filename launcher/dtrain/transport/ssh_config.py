"""OpenSSH's client configuration: ``~/.ssh/config`` and the files that it includes.

paramiko has a reader too, but it knows no ``Include``, expands few tokens, and runs the commands
of ``Match exec``. Here the whole language is read, except that:

- ``Match exec``, ``localnetwork``, ``tagged`` and ``canonical`` never match, because reading a
  file must not run programs and host names are not canonicalized; `Config.ignored` names them.
- A line that cannot be understood raises `SshConfigError` with file and line.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MAX_INCLUDE_DEPTH = 16
MULTIPLE = frozenset({"identityfile", "certificatefile"})
"""Keywords whose values add up; of all others the first value counts."""

_LINE = re.compile(r"\s*([A-Za-z0-9]+)(?:\s*=\s*|\s+)(.*?)\s*$")
_WORD = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[^\s"'])*)(?=\s|$)""")
_WITHOUT_ARGUMENT = frozenset({"all", "canonical", "final"})


class SshConfigError(Exception):
    """A configuration file that cannot be read; the message starts with ``file:line``."""


@dataclass(frozen=True, slots=True)
class _Criterion:
    keyword: str
    """``host``, ``originalhost``, ``user``, ``localuser``, ``all``, ``final``, or ``never``."""
    patterns: tuple[str, ...] = ()
    negated: bool = False


@dataclass(frozen=True, slots=True)
class _Block:
    """Settings that apply where every one of ``conditions`` holds: an included file's blocks
    carry those of the block that includes it."""

    conditions: tuple[tuple[_Criterion, ...], ...]
    settings: list[tuple[str, str]] = field(default_factory=list)


@dataclass(slots=True)
class Config:
    """What one or several files say, to be asked for one host after another."""

    blocks: list[_Block] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    """What was read but never applies, as ``file:line: what``."""

    def read(self, path: Path, home: Path, *, user_file: bool = True) -> None:
        """Append ``path``; its relative includes are in ``~/.ssh`` (``/etc/ssh`` if it is not a
        user's file). A file that does not exist is empty. Raises SshConfigError."""
        folder = home / ".ssh" if user_file else Path("/etc/ssh")
        self._read(path, home, folder, (), 0)

    def lookup(self, host: str, *, local_user: str, user: str | None = None) -> Options:
        """What applies to the host that is called ``host``.

        ``user`` is the remote user when something stronger than the files has chosen one.
        """
        values: dict[str, list[str]] = {"user": [user]} if user else {}
        for final in (False, True):
            # A second pass only serves `Match final`: all first values are already taken.
            for block in self.blocks:
                facts = _Facts(host, values, local_user, final)
                if not all(facts.satisfy(condition) for condition in block.conditions):
                    continue
                if final and not any(c.keyword == "final" for cs in block.conditions for c in cs):
                    continue
                for keyword, value in block.settings:
                    known = values.setdefault(keyword, [])
                    if not known or (keyword in MULTIPLE and value not in known):
                        known.append(value)
        return Options({keyword: tuple(found) for keyword, found in values.items()})

    def _read(
        self,
        path: Path,
        home: Path,
        folder: Path,
        conditions: tuple[tuple[_Criterion, ...], ...],
        depth: int,
    ) -> None:
        try:
            text = path.read_text(encoding="utf-8", errors="surrogateescape")
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise SshConfigError(f"{path}: {error.strerror}") from error
        block = _Block(conditions)
        self.blocks.append(block)
        for number, line in enumerate(text.splitlines(), 1):
            where = f"{path}:{number}"
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            match = _LINE.match(line)
            if not match:
                raise SshConfigError(f"{where}: not `keyword value`: {line.strip()!r}")
            keyword, value = match[1].lower(), match[2]
            if keyword == "host":
                criterion = _Criterion("originalhost", tuple(_words(value, where)))
                block = _Block((*conditions, (criterion,)))
                self.blocks.append(block)
            elif keyword == "match":
                block = _Block((*conditions, self._criteria(value, where)))
                self.blocks.append(block)
            elif keyword == "include":
                if depth >= MAX_INCLUDE_DEPTH:
                    raise SshConfigError(f"{where}: more than {MAX_INCLUDE_DEPTH} nested includes")
                for name in _words(value, where):
                    for included in _glob(name, home, folder):
                        self._read(included, home, folder, block.conditions, depth + 1)
                # What follows in this file comes after what was included.
                block = _Block(block.conditions)
                self.blocks.append(block)
            else:
                block.settings.append((keyword, _argument(keyword, value, where)))

    def _criteria(self, value: str, where: str) -> tuple[_Criterion, ...]:
        words = _words(value, where)
        criteria: list[_Criterion] = []
        while words:
            word = words.pop(0)
            negated, keyword = word.startswith("!"), word.lstrip("!").lower()
            patterns: tuple[str, ...] = ()
            if keyword not in _WITHOUT_ARGUMENT:
                if not words:
                    raise SshConfigError(f"{where}: `Match {keyword}` lacks its argument")
                patterns = tuple(words.pop(0).split(","))
            if keyword not in {"host", "originalhost", "user", "localuser", "all", "final"}:
                self.ignored.append(f"{where}: `Match {keyword}` is not supported")
                # Never matching, negated or not: what it would say is unknown.
                keyword, negated = "never", False
            criteria.append(_Criterion(keyword, patterns, negated))
        if not criteria:
            raise SshConfigError(f"{where}: `Match` lacks its criteria")
        return tuple(criteria)


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of one host; keywords are in lower case."""

    values: Mapping[str, tuple[str, ...]]

    def get(self, keyword: str) -> str | None:
        """The value that counts, or None."""
        found = self.values.get(keyword)
        return found[0] if found else None

    def all(self, keyword: str) -> tuple[str, ...]:
        return self.values.get(keyword, ())


@dataclass(frozen=True, slots=True)
class _Facts:
    host: str
    values: Mapping[str, list[str]]
    local_user: str
    final: bool

    def satisfy(self, criteria: tuple[_Criterion, ...]) -> bool:
        return all(self._holds(criterion) != criterion.negated for criterion in criteria)

    def _holds(self, criterion: _Criterion) -> bool:
        match criterion.keyword:
            case "all":
                return True
            case "final":
                return self.final
            case "originalhost":
                return matches(self.host, criterion.patterns)
            case "host":
                name = self.values.get("hostname", [self.host])[0].replace("%h", self.host)
                return matches(name, criterion.patterns)
            case "user":
                user = self.values.get("user", [self.local_user])[0]
                return matches(user, criterion.patterns)
            case "localuser":
                return matches(self.local_user, criterion.patterns)
            case _:
                return False


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """OpenSSH's pattern list: ``*`` and ``?`` are wild, and a match with ``!`` decides."""
    found = False
    for pattern in patterns:
        negated, text = pattern.startswith("!"), pattern.removeprefix("!")
        # OpenSSH knows no [...], which fnmatch does.
        if fnmatch.fnmatchcase(name.lower(), text.lower().replace("[", "[[]")):
            if negated:
                return False
            found = True
    return found


def expand(text: str, token: Callable[[str], str | None]) -> str:
    """Replace ``%x`` by what ``token`` gives for ``x`` (None leaves it), and ``%%`` by ``%``."""

    def replacement(match: re.Match[str]) -> str:
        if match[1] == "%":
            return "%"
        value = token(match[1])
        return match[0] if value is None else value

    return re.sub(r"%(.)", replacement, text)


def _argument(keyword: str, value: str, where: str) -> str:
    # Commands go to a shell as they stand; file lists are split where they are used.
    if keyword in {"proxycommand", "localcommand", "remotecommand"}:
        return value
    if keyword in {"userknownhostsfile", "globalknownhostsfile"}:
        _words(value, where)
        return value
    words = _words(value, where)
    return words[0] if words else ""


def _words(value: str, where: str) -> list[str]:
    """Split at blanks outside quotes; a ``#`` that starts a word starts a comment."""
    words = []
    position = 0
    while match := _WORD.match(value, position):
        if not match[1] or match[1].startswith("#"):
            break
        words.append(re.sub(r"[\"']", "", match[1]))
        position = match.end()
    if value[position:].lstrip()[:1] in ('"', "'"):
        raise SshConfigError(f"{where}: a quote is not closed")
    return words


def split_files(value: str) -> list[str]:
    """The names in a ``UserKnownHostsFile`` line."""
    return _words(value, "UserKnownHostsFile")


def _glob(name: str, home: Path, folder: Path) -> Iterator[Path]:
    if name.startswith("~/"):
        name = str(home / name[2:])
    path = Path(name)
    pattern = path if path.is_absolute() else folder / path
    anchor = Path(pattern.anchor)
    yield from sorted(found for found in anchor.glob(str(pattern.relative_to(anchor))))
