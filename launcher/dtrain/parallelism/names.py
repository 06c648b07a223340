"""Look up table entries by name, with suggestions for unknown names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Protocol, TypeVar

from dtrain.diagnostics import UsageError
from dtrain.wording import either

_Row = TypeVar("_Row", bound="_Named")


@lru_cache(maxsize=1024)
def key(name: str) -> str:
    """Normalize a name: ``NVIDIA A100-SXM4-80GB`` and ``a100_sxm4_80gb`` have the same key."""
    letters = (letter for letter in name.casefold() if letter.isalnum() or letter == ".")
    return "".join(letters).removeprefix("nvidia")


class _Named(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def aliases(self) -> tuple[str, ...]: ...


def find(spellings: Iterable[str], rows: Iterable[_Row], what: str, otherwise: str) -> _Row:
    """Return the row with the first of ``spellings`` that is a name or an alias. The last of equal
    ones counts.

    ``what`` is the kind of thing in words, ``otherwise`` what to do if it is in no table.

    Raises:
        UsageError: no row has the name.
    """
    rows, (name, *others) = tuple(rows), tuple(spellings)
    entries = {key(known): row for row in rows for known in (*row.aliases, row.name)}
    wanted = key(name)
    for spelling in (wanted, *map(key, others)):
        if spelling in entries:
            return entries[spelling]
    row_of = {known: row.name for row in rows for known in (row.name, *row.aliases)}
    # A part such as "h100" or "llama-70b" may match several names: suggest all of them.
    alike = [row.name for row in rows if wanted and wanted in key(row.name)]
    alike.sort(key=lambda known: key(known).index(wanted))
    if (words := _words(name)) and not alike:
        alike = [known for known in row_of if words <= _words(known)]
    close = [known for each in (name, *others) for known in nearest(each, row_of)]
    suggestions: dict[str, str] = {}  # one for each row
    for known in (*close, *alike):
        suggestions.setdefault(row_of[known], known)
    hint = otherwise[:1].lower() + otherwise[1:]
    if suggestions:
        hint = f"did you mean {either([*suggestions.values()][:4])}? {otherwise}".strip()
    raise UsageError(f"{name!r} is not a {what} that dtrain knows", hint=hint)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+|\d[\d.]*[a-z]?", name.casefold()))


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return the most similar name, or nothing if none is similar. With other digits, it would be
    another version or size."""
    from difflib import get_close_matches  # takes 7 ms, needed only for unknown names

    def digits(text: str) -> str:
        return "".join(filter(str.isdigit, text))

    plain = key(name)[:64].replace(".", "")
    keys = {key(known).replace(".", ""): known for known in names}
    same = [known for known in keys if digits(known) == digits(plain)]
    return [keys[close] for close in get_close_matches(plain, same, n=1, cutoff=0.8)]
