"""Reads ssh's client configuration on machines where `ssh -G` is not available.

Follows OpenSSH 9: the first value wins, blocks are evaluated in order with the values found so
far, and `Match final` causes a second pass. Features that only ssh has (`Match exec`, canonical
names) raise SshConfigError if the result depends on them.
"""

from __future__ import annotations

import fnmatch
import glob
import ipaddress
import os
import pwd
import re
import shlex
import socket
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path

from dtrain.records import dataclass
from dtrain.transport.ssh_options import ALIASES, Options, SshConfigError, known, validate

MAX_INCLUDE_DEPTH = 16
_FORWARDS = frozenset({"dynamicforward", "localforward", "remoteforward"})
ADDED_UP = frozenset({"certificatefile", "identityfile", "sendenv", "setenv"}) | _FORWARDS
"""Keywords whose values accumulate. For all other keywords the first value wins."""
_COMMANDS = frozenset({"knownhostscommand", "localcommand", "proxycommand", "remotecommand"})
_FILES = frozenset({"globalknownhostsfile", "revokedhostkeys", "userknownhostsfile"})
_SEVERAL_WORDS = _FORWARDS | {
    "addkeystoagent",
    "canonicaldomains",
    "canonicalizepermittedcnames",
    "channeltimeout",
    "ipqos",
    "logverbose",
    "obscurekeystroketiming",
    "permitremoteopen",
    "rekeylimit",
    "sendenv",
    "setenv",
    "versionaddendum",
}
_KEYWORD = re.compile(r"\s*([A-Za-z0-9]+)(?:\s*=\s*|\s+)(.*?)\s*$")
_ALONE = frozenset({"all", "canonical", "final"})
_NEEDS_SSH = frozenset({"command", "exec", "localnetwork", "sessiontype", "tagged", "version"})
HOST = re.compile(r"(?!-)[^\s\x00-\x1f\x7f'`\"$\\;&<>|(){},@]+")
USER = re.compile(r"(?!-)(?!.*\s-)(?!.*\\\Z)[^\x00-\x1f\x7f'`\"$%;&<>|(){}]+")
"""The names that OpenSSH accepts, except user names with `$` or `%`, which OpenSSH 10 expands."""


@dataclass(frozen=True, slots=True)
class _Criterion:
    keyword: str
    negated: bool
    argument: str = ""


@dataclass(frozen=True, slots=True)
class _Line:
    where: str
    keyword: str
    values: tuple[str, ...] = ()
    criteria: tuple[_Criterion, ...] = ()
    included: tuple[tuple[_Line, ...], ...] = ()


@dataclass(slots=True)
class Config:
    """The contents of one or more configuration files. `lookup` returns the options of a host."""

    files: list[tuple[_Line, ...]] = field(default_factory=list)

    def read(self, path: Path, home: Path, *, user_file: bool = True, checked: bool = True) -> None:
        """Append ``path``. Its relative includes start at ``~/.ssh``, or at ``/etc/ssh`` if
        ``user_file`` is false. A missing file counts as empty.

        Raises SshConfigError if the file is invalid, or if ``checked`` is true and another user
        can write to it.
        """
        self.files.append(_read(path, _Folders(home, user_file), checked=checked, depth=0))

    def lookup(
        self,
        host: str,
        *,
        local_user: str,
        user: str | None = None,
        port: int | None = None,
        jump: str | None = None,
        home: Path = Path("/"),
    ) -> Options:
        """The options of ``host``, as `ssh -l USER -p PORT -J JUMP -G HOST` prints them.

        Raises SshConfigError.
        """
        given = {"user": user, "port": str(port) if port else None, "proxyjump": jump}
        lookup = _Lookup(host, {key: [value] for key, value in given.items() if value}, local_user)
        lookup.run(self.files)
        values = lookup.values
        name = expand(values.get("hostname", [host])[0], {"h": host}.get)
        name = canonical(name, values.get("addressfamily", ["any"])[0].lower())
        if lookup.wants_final:
            values["hostname"] = [name]
            lookup.host, lookup.final = name, True
            lookup.run(self.files)
        values["hostname"] = [name]
        values.setdefault("user", [local_user])
        values["port"] = [str(_port(values.get("port", ["22"])[0]))]
        if "hostkeyalias" in values:
            values["hostkeyalias"] = [values["hostkeyalias"][0].lower()]
        alias = values.get("hostkeyalias", [host])[0]
        user = values["user"][0]
        tokens = standard_tokens(host, name, values["port"][0], user, alias, local_user, home)
        for keyword in ("identityagent", "userknownhostsfile"):
            values[keyword] = [expand_path(text, tokens, home) for text in values.get(keyword, ())]
        return Options({keyword: tuple(found) for keyword, found in values.items() if found}, {})


@dataclass(slots=True)
class _Lookup:
    host: str
    """The name that `Host` compares: as given, and in the final pass as resolved."""
    values: dict[str, list[str]]
    local_user: str
    original: str = ""
    final: bool = False
    wants_final: bool = False

    def __post_init__(self) -> None:
        self.original = self.host

    def run(self, files: list[tuple[_Line, ...]]) -> None:
        for lines in files:
            self._file(lines, active=True, never=False)

    def _file(self, lines: tuple[_Line, ...], *, active: bool, never: bool) -> None:
        """``never``: the Include line is in a block that does not match."""
        for line in lines:
            if line.keyword == "host":
                active = not never and matches(self.host, line.values, fold=False)
            elif line.keyword == "match":
                active = self._matches(line) and not never
            elif line.keyword == "include":
                for included in line.included:
                    self._file(included, active=active, never=never or not active)
            elif not known(line.keyword):
                ignored = self.values.get("ignoreunknown", [""])[0].split(",")
                if not matches(line.keyword, tuple(ignored)):
                    raise SshConfigError(
                        f"{line.where}: bad configuration option: {line.keyword}",
                        "correct it, or name it in an IgnoreUnknown line above",
                    )
            elif active:
                self._set(line)

    def _set(self, line: _Line) -> None:
        keyword = line.keyword
        found = self.values.get(keyword, [])
        if keyword in ADDED_UP:
            new = [value for value in line.values if value not in found]
        elif found or (keyword == "connecttimeout" and line.values == ("none",)):
            new = []
        elif keyword in {"proxyjump", "proxycommand"}:
            # The first one also disables the other, except for `ProxyJump none`.
            jump = self.values.get("proxyjump", ["none"])[0].lower() != "none"
            new = [] if jump or "proxycommand" in self.values else [*line.values]
        else:
            new = [*line.values]
        if new:
            self.values[keyword] = [*found, *new]

    def _matches(self, line: _Line) -> bool:
        if _Criterion("final", negated=True) in line.criteria:
            # Whether this alone causes a second pass depends on the version of OpenSSH.
            raise _only_ssh_knows(line, "!final")
        # ssh evaluates all criteria, even after one fails.
        self.wants_final |= any(criterion.keyword == "final" for criterion in line.criteria)
        decided = [one for one in line.criteria if one.keyword not in _NEEDS_SSH]
        if not all(self._holds(criterion) != criterion.negated for criterion in decided):
            return False
        for criterion in line.criteria:
            if criterion.keyword in _NEEDS_SSH:
                raise _only_ssh_knows(line, criterion.keyword)
        return True

    def _holds(self, criterion: _Criterion) -> bool:
        patterns = tuple(criterion.argument.split(","))
        match criterion.keyword:
            case "canonical" | "final":
                return self.final
            case "originalhost":
                return matches(self.original, patterns)
            case "host":
                name = self.values.get("hostname", [self.original])[0]
                if not self.final:
                    name = expand(name, {"h": self.original}.get)
                return matches(name, patterns)
            case "user":
                user = self.values.get("user", [self.local_user])[0]
                return matches(user, patterns, fold=False)
            case "localuser":
                return matches(self.local_user, patterns, fold=False)
            case _:
                return True


def _only_ssh_knows(line: _Line, criterion: str) -> SshConfigError:
    return SshConfigError(
        f"{line.where}: `Match {criterion}` needs the `ssh` program",
        "install OpenSSH's client, or move these settings to a `Host` block; if HOME is not the "
        "account's home folder, set `config` under `ssh` to the file",
    )


@dataclass(frozen=True, slots=True)
class _Folders:
    home: Path
    user_file: bool

    def included(self, name: str, where: str) -> list[str]:
        """The files that an Include names."""
        if name.startswith("~") and not self.user_file:
            raise SshConfigError(f"{where}: bad include path {name}")
        pattern = tilde(name, self.home)
        if not pattern.startswith("/"):
            pattern = f"{self.home / '.ssh' if self.user_file else '/etc/ssh'}/{pattern}"
        return sorted(glob.glob(pattern))  # noqa: PTH207 (pathlib's glob finds hidden files too)


def _read(path: Path, folders: _Folders, *, checked: bool, depth: int) -> tuple[_Line, ...]:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if checked and (status.st_uid not in {0, os.getuid()} or status.st_mode & 0o022):
                raise SshConfigError(
                    f"bad owner or permissions on {path}: it has owner {_owner(status.st_uid)} "
                    f"and mode {status.st_mode & 0o7777:o}",
                    _repair(path, status),
                )
            text = file.read().decode("utf-8", "surrogateescape")
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise SshConfigError(f"{path}: {error.strerror}") from error
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path}:{number}"
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _KEYWORD.match(line)
        if not match or not match[2]:
            raise SshConfigError(f"{where}: not `keyword value`: {line.strip()!r}")
        keyword = ALIASES.get(match[1].lower(), match[1].lower())
        if keyword == "match":
            lines.append(_Line(where, keyword, criteria=_criteria(match[2], where)))
        elif keyword == "include":
            if depth >= MAX_INCLUDE_DEPTH:
                raise SshConfigError(f"{where}: more than {MAX_INCLUDE_DEPTH} nested includes")
            included = tuple(
                _read(Path(file), folders, checked=True, depth=depth + 1)
                for name in words(match[2], where)
                for file in folders.included(name, where)
            )
            lines.append(_Line(where, keyword, included=included))
        else:
            lines.append(_Line(where, keyword, _values(keyword, match[2], where)))
    return tuple(lines)


def _values(keyword: str, text: str, where: str) -> tuple[str, ...]:
    """The values of a line. Raises SshConfigError if there are too few or too many."""
    found = words(text, where)
    if keyword in _COMMANDS:
        return (text.lstrip(" \t="),)
    if keyword == "proxyjump":
        jumps = text.lstrip(" \t=").partition("#")[0].rstrip()
        for spec in jumps.split(",") if jumps.lower() != "none" else ():
            jump_spec(spec, where)
        return (jumps,)
    if not found or "" in found:
        raise SshConfigError(f"{where}: {keyword} needs an argument")
    if keyword in _FILES or keyword == "host":
        if keyword != "host" and len(found) > 1 and "none" in (word.lower() for word in found):
            raise SshConfigError(f"{where}: {keyword} `none` must be the only value")
        return tuple(found)
    if keyword in _SEVERAL_WORDS or not known(keyword):
        return (" ".join(found),)
    if len(found) > 1:
        raise SshConfigError(f"{where}: extra arguments after {keyword} {found[0]}")
    try:
        if keyword == "port":
            _port(found[0])
        validate(keyword, found[0])
    except SshConfigError as error:
        raise SshConfigError(f"{where}: {error}") from error
    return (found[0],)


def _criteria(text: str, where: str) -> tuple[_Criterion, ...]:
    # OpenSSH also accepts `=` between a criterion and its argument.
    rest = [
        piece
        for word in words(text, where)
        for piece in (word.split("=", 1) if re.match(r"!?[a-zA-Z]+=", word) else [word])
    ]
    criteria: list[_Criterion] = []
    while rest:
        word = rest.pop(0)
        keyword, negated = word.removeprefix("!").lower(), word.startswith("!")
        if keyword in _ALONE:
            criteria.append(_Criterion(keyword, negated))
            continue
        if keyword not in _NEEDS_SSH | {"host", "localuser", "originalhost", "user"}:
            raise SshConfigError(f"{where}: unsupported Match attribute {word}")
        if not rest:
            raise SshConfigError(f"{where}: `Match {keyword}` needs an argument")
        criteria.append(_Criterion(keyword, negated, rest.pop(0)))
    if not criteria:
        raise SshConfigError(f"{where}: `Match` needs criteria")
    for index, criterion in enumerate(criteria):
        if criterion.keyword == "all" and (index > 1 or index + 1 < len(criteria)):
            raise SshConfigError(f"{where}: `all` cannot be combined with other attributes")
    return tuple(criteria)


def words(text: str, where: str) -> list[str]:
    """Split at blanks outside quotes. A ``#`` at the start of a word starts a comment."""
    found: list[str] = []
    quote, word = "", None
    position = 0
    while position < len(text):
        character = text[position]
        if character == "\\":
            following = text[position + 1 : position + 2]
            if following and (following in "'\"\\" or (following == " " and not quote)):
                position += 1
                character = following
            word = (word or "") + character
        elif not quote and character in " \t":
            if word is not None:
                found.append(word)
            word = None
        elif not quote and word is None and character == "#":
            break
        elif not quote and character in "'\"":
            quote, word = character, word or ""
        elif character == quote:
            quote = ""
        else:
            word = (word or "") + character
        position += 1
    if quote:
        raise SshConfigError(f"{where}: missing closing quote")
    return found if word is None else [*found, word]


def matches(name: str, patterns: tuple[str, ...], *, fold: bool = True) -> bool:
    """Whether ``name`` matches an OpenSSH pattern list.

    ``*`` and ``?`` are wildcards. A name that matches a pattern with ``!`` does not match the
    list. ``fold`` ignores case.
    """
    found = False
    name = name.lower() if fold else name
    for pattern in patterns:
        text = pattern.lower() if fold else pattern
        negated, text = text.startswith("!"), text.removeprefix("!")
        if text == name or (("*" in text or "?" in text) and _matches(name, text)):
            if negated:
                return False
            found = True
    return found


def _matches(name: str, pattern: str) -> bool:
    # fnmatch supports [...], OpenSSH does not.
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def canonical(name: str, family: str = "any") -> str:
    """A host name as ssh writes it: in lower case. An IP address of an allowed AddressFamily is
    in its shortest form."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name.lower()
    return str(address) if family in {"any", {4: "inet", 6: "inet6"}[address.version]} else name


def standard_tokens(
    name: str, address: str, port: str, user: str, alias: str, local_user: str, home: Path
) -> Callable[[str], str | None]:
    """The values of the tokens (``%h``, ...) that OpenSSH expands in most options."""
    hostname = socket.gethostname()
    tokens: Mapping[str, str] = {
        "d": str(home),
        "h": address,
        "i": str(os.getuid()),
        "k": alias,
        "L": hostname.split(".")[0],
        "l": hostname,
        "n": name,
        "p": port,
        "r": user,
        "u": local_user,
    }
    return tokens.get


def expand(text: str, token: Callable[[str], str | None]) -> str:
    """Replace ``%x`` with the result of ``token`` for ``x``, and ``%%`` with ``%``.

    Raises SshConfigError if a token has no value.
    """

    def replacement(match: re.Match[str]) -> str:
        value = "%" if match[1] == "%" else token(match[1])
        if value is None:
            raise SshConfigError(f"dtrain does not support the token {match[0]} in {text!r}")
        return value

    return re.sub(r"%(.?)", replacement, text, flags=re.DOTALL)


def expand_path(text: str, token: Callable[[str], str | None], home: Path) -> str:
    """Expand ``~``, tokens and ``${VARIABLE}`` in a file name. Raises SshConfigError."""

    def replacement(match: re.Match[str]) -> str:
        if match[1] is None:
            return expand(match[0], token)
        value = os.environ.get(match[1])
        if value is None:
            raise SshConfigError(f"the environment variable {match[1]!r} in {text!r} is not set")
        return value

    return re.sub(r"\$\{([^}]*)\}|%.?", replacement, tilde(text, home), flags=re.DOTALL)


def tilde(text: str, home: Path) -> str:
    if not text.startswith("~"):
        return text
    user, slash, rest = text[1:].partition("/")
    try:
        return f"{pwd.getpwnam(user).pw_dir if user else home}{slash}{rest}"
    except KeyError:
        raise SshConfigError(f"{text}: there is no user {user}") from None


def _port(text: str) -> int:
    try:
        port = int(text) if re.fullmatch(r"[0-9]+", text) else socket.getservbyname(text, "tcp")
    except OSError:
        raise SshConfigError(f"port {text!r} is not a number") from None
    if not 0 < port < 1 << 16:
        raise SshConfigError(f"port {text!r} is not between 1 and 65535")
    return port


def _repair(path: Path, status: os.stat_result) -> str:
    name = shlex.quote(str(path))
    if status.st_uid in {0, os.getuid()}:
        return f"remove write access for other users: chmod go-w {name}"
    return f"replace the file with your own, or run: sudo chown {_owner(os.getuid())} {name}"


def _owner(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def jump_spec(spec: str, where: str) -> tuple[str | None, str, int | None]:
    """Split ``[user@]host[:port]`` or ``ssh://…``. An IPv6 address with a port needs brackets."""
    match = re.fullmatch(
        r"(?:ssh://)?(?:(?P<user>.+)@)?"
        r"(?:\[(?P<bracketed>[^\[\]]+)\]|(?P<v6>[^@\[\]]*:[^@\[\]]*:[^@\[\]]*)|(?P<host>[^@:\[\]]+))"
        r"(?::(?P<port>\d{1,5}))?/?",
        spec,
    )
    if not match:
        raise SshConfigError(f"{where}: {spec!r} is not a jump host ([user@]host[:port])")
    where = match["bracketed"] or match["v6"] or match["host"]
    port = int(match["port"]) if match["port"] else None
    if port is not None and not 0 < port < 1 << 16:
        raise SshConfigError(f"{where}: the port of jump host {spec!r} is not between 1 and 65535")
    require_safe("jump host", where, HOST)
    require_safe("user name", match["user"], USER)
    return match["user"], where, port


def require_safe(what: str, text: str | None, pattern: re.Pattern[str]) -> None:
    """Raise SshConfigError if ``text`` is unsafe on the command lines of ProxyCommand and ssh."""
    if text is not None and not pattern.fullmatch(text):
        raise SshConfigError(
            f"the {what} {text!r} contains characters that OpenSSH refuses",
            "names cannot start with '-' or contain blanks or any of '`\"$;&<>|(){}",
        )
