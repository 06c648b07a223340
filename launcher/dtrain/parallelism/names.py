"""Look up table entries by name, with suggestions for unknown names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TypeVar

from dtrain.diagnostics import UsageError

_Entry = TypeVar("_Entry")


@lru_cache(maxsize=1024)
def key(name: str) -> str:
    """Normalize a name: ``A100-SXM4-80GB`` and ``a100 sxm4 80gb`` have the same key."""
    words = name.casefold().removeprefix("nvidia ")
    return "".join(letter for letter in words if letter.isalnum() or letter == ".")


def index(entries: Iterable[tuple[str, Iterable[str], _Entry]]) -> dict[str, _Entry]:
    """Map the keys of names and aliases to entries. A later entry replaces one with its key."""
    found: dict[str, _Entry] = {}
    for name, aliases, entry in entries:
        for alias in aliases:
            found[key(alias)] = entry
        found[key(name)] = entry
    return found


def find(
    name: str, entries: Mapping[str, _Entry], names: Iterable[str], *, what: str, otherwise: str
) -> _Entry:
    """Return the entry of ``name`` in an ``index``.

    ``what`` is the kind of thing in words, ``otherwise`` what to do if it is in no table, and
    ``names`` those that may be suggested.

    Raises:
        UsageError: no entry has that name.
    """
    wanted = key(name)
    if wanted in entries:
        return entries[wanted]
    names = tuple(names)
    close = nearest(name, names)
    # A prefix such as "h100" may match several names: suggest all of them.
    suggestions = [known for known in names if wanted and wanted in key(known)][:4] or close
    hint = otherwise[:1].lower() + otherwise[1:]
    if suggestions:
        hint = f"did you mean {' or '.join(suggestions)}? {otherwise}".strip()
    raise UsageError(f"{name!r} is not a {what} that dtrain knows", hint=hint)


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return the most similar name, or nothing if none is similar."""
    from difflib import get_close_matches  # takes 7 ms, needed only for unknown names

    keys = {key(known): known for known in names}
    return [keys[close] for close in get_close_matches(key(name)[:64], keys, n=1, cutoff=0.6)]
