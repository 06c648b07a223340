"""Numbers and nouns in messages. Pure."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """``1 host``, ``2,048 hosts``."""
    return f"{number:,} {plural(number, noun)}"


def plural(number: int, noun: str) -> str:
    """The regular ``noun`` as it follows ``number``."""
    if number == 1:
        return noun
    return f"{noun}es" if noun.endswith(("ch", "s")) else f"{noun}s"


def short(number: float, space: str = "") -> str:
    """Three digits and a decimal unit: ``950``, ``6.6k``, ``1.2G``; with ``space`` before it."""
    for unit in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g}{space}{unit}"
        number /= 1000
    return f"{number:.3g}{space}T"


def in_bytes(number: float) -> str:
    """A number of bytes: ``950 B``, ``12.3 MB``."""
    return f"{short(number, ' ')}B"


def either(names: Iterable[str], word: str = "or") -> str:
    """``a, b or c``."""
    listed = list(names)
    return f" {word} ".join(filter(None, [", ".join(listed[:-1]), listed[-1]])) if listed else ""


def login_waits(host: str) -> str:
    """What the user can do about a host that has accepted the login and says nothing."""
    return f"if a login to {host} takes as long, a login script waits there"
