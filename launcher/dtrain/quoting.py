"""Shell commands as a type that separates literal shell text from quoted words.

    sh("cd ", path("~/my runs"), " && exec ", words([python, "-c", code]))

A plain string given to `sh` is shell text that the author wrote. Anything that comes from a user,
a file or a host goes through `word`, `words` or `path`, and reaches the program byte-exact.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from dtrain.records import dataclass

_BARE = re.compile(r"[A-Za-z0-9@%+:,./_-]+|-[A-Za-z0-9@%+:,./_=-]*")
_RESERVED = re.compile(
    "case|coproc|do|done|elif|else|end|esac|fi|for|foreach|function|if|in|repeat|select|then|time"
    "|until|while"
)


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """Shell text that is safe to pass to a POSIX shell. ``str()`` returns the text."""

    text: str

    def __str__(self) -> str:
        return self.text


def sh(*parts: str | ShellCommand) -> ShellCommand:
    """Join shell text and quoted words, adding nothing between them.

    Raises ValueError if a part contains a NUL, which a command line cannot contain.
    """
    return ShellCommand(_without_nul("".join(str(part) for part in parts)))


def word(text: str) -> ShellCommand:
    """Quote ``text`` so that the shell passes it on as exactly one argument.

    Raises ValueError on a NUL.
    """
    return ShellCommand(_quoted(_without_nul(text)))


def words(argv: Iterable[str]) -> ShellCommand:
    """Quote each argument and separate them by spaces. Raises ValueError on a NUL."""
    return ShellCommand(" ".join(str(word(argument)) for argument in argv))


def path(text: str) -> ShellCommand:
    """Quote a path as `word` does, except that a leading ``~`` or ``~/`` stays the home folder.

    Raises ValueError on a NUL.
    """
    if text == "~":
        return ShellCommand("~")
    if text.startswith("~/"):
        rest = text[2:]
        return ShellCommand("~/" + (_quoted(_without_nul(rest)) if rest else ""))
    return word(text)


def _quoted(text: str) -> str:
    # Stricter than shlex.quote about what stays bare: `A=1` first in a command is an assignment,
    # zsh expands `=name`, and `if` is syntax.
    if _BARE.fullmatch(text) and not _RESERVED.fullmatch(text):
        return text
    # fish alone reads backslashes inside single quotes; outside them all shells agree.
    quoted = shlex.quote(text).replace("\\", "'\\\\'")
    return quoted if quoted != text else f"'{text}'"


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"a command line cannot hold a NUL character: {text!r}")
    return text
