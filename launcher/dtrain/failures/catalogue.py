"""Known ways to fail: how they show, what they mean, and what to do. Pure.

The knowledge is data: ``signatures.yaml``, whose head explains its format. What a worker says is
searched for phrases rather than by regular expressions, so that no text, however long or hostile,
takes longer than a few passes over it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

MOST = 1 << 16
"""Characters of a text that are looked at: its end, where the reason stands."""

_SILENT = {"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"}
"""Signals that come from outside: what the process had said before does not explain its end."""

_HANDLING = "During handling of the above exception, another exception occurred:"


class Phrase:
    """Words that stand in one line, in this order: ``*`` between them stands for anything.

    With ``^`` before them the line begins with them.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._at_start = text.startswith("^")
        self._first, *self._rest = text.removeprefix("^").split("*")

    def stands_in(self, text: str) -> bool:
        """Whether a line of ``text`` has it; looks at each line once."""
        at = text.find(self._first)
        while at >= 0:
            stop = text.find("\n", at)
            stop = len(text) if stop < 0 else stop
            if (not self._at_start or at == 0 or text[at - 1] == "\n") and self._goes_on(
                text, at + len(self._first), stop
            ):
                return True
            at = text.find(self._first, stop)
        return False

    def _goes_on(self, text: str, at: int, stop: int) -> bool:
        for part in self._rest:
            at = text.find(part, at, stop)
            if at < 0:
                return False
            at += len(part)
        return True


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended, as far as that tells why."""

    code: int | None = None
    signal: str | None = None
    out_of_memory: bool = False
    """Whether the kernel killed something on that host for want of memory just then."""
    message: str = ""
    """The last line of what it said, or the message of its last exception."""
    said: str = ""
    """Everything it said about its end."""


@dataclass(frozen=True, slots=True)
class Signature:
    """One known way to fail. Whatever is given here must hold of an end."""

    id: str
    what: str
    """What happened, as a clause."""
    remedy: str
    says: tuple[Phrase, ...] = ()
    """One of these stands in what it said."""
    signals: tuple[str, ...] = ()
    codes: tuple[int, ...] = ()
    out_of_memory: bool = False
    echo: bool = False
    """Whether this usually follows from the failure of another process."""
    host: bool = False
    """Whether the host is to blame, and another one would do better."""
    details: re.Pattern[str] | None = None
    """Finds figures in what it said, to be named as in ``precisely``."""
    precisely: str = ""
    """Stands in for ``what`` where ``details`` are found."""

    def fits(self, end: End, text: str) -> bool:
        """Whether ``end`` is of this kind, going by ``text`` of all that was said."""
        if self.signals:
            if end.signal not in self.signals:
                return False
        elif end.signal in _SILENT or (self.echo and end.signal not in (None, "SIGABRT")):
            # A crash such as a segmentation fault is the process's own, whatever it was told by
            # its peers before; libraries that give up because of a peer abort.
            return False
        return (
            (not self.codes or end.code in self.codes)
            and (not self.out_of_memory or end.out_of_memory)
            and (not self.says or any(phrase.stands_in(text) for phrase in self.says))
        )

    def told(self, text: str) -> str:
        """What happened, with the figures that ``text`` gives."""
        found = self.details.search(text) if self.details is not None else None
        return self.precisely.format(**found.groupdict()) if found is not None else self.what


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known of one failure."""

    id: str
    """The signature's."""
    what: str
    remedy: str
    echo: bool
    host: bool


def explain(end: End) -> Explanation | None:
    """The first signature that fits, if any: those of a process's own faults before echoes.

    Of its own faults, the last exception and what that says it came from count more than an
    exception that was being handled.
    """
    said = f"{end.message}\n{end.said}".strip()[-MOST:]
    return _explain(end.code, end.signal, end.out_of_memory, said)


# Thousands of ranks of one run say the same, and each is asked for several times.
@lru_cache(maxsize=4096)
def _explain(
    code: int | None, signal: str | None, out_of_memory: bool, said: str
) -> Explanation | None:
    end = End(code, signal, out_of_memory)
    last = said.rpartition(_HANDLING)[2]
    for echo, text in ((False, last), (False, said), (True, said)):
        for known in signatures():
            if known.echo is echo and known.fits(end, text):
                return Explanation(known.id, known.told(said), known.remedy, known.echo, known.host)
    return None


@cache
def signatures() -> tuple[Signature, ...]:
    """The catalogue, in the order in which it is gone through."""
    source = Path(__file__).with_name("signatures.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return tuple(_signature(entry) for entry in yaml.load(source, loader))  # noqa: S506


def _signature(entry: Mapping[str, Any]) -> Signature:
    given = dict(entry)
    details = given.pop("details", None)
    return Signature(
        says=tuple(Phrase(text) for text in given.pop("says", ())),
        signals=tuple(given.pop("signals", ())),
        codes=tuple(given.pop("codes", ())),
        details=re.compile(details) if details is not None else None,
        **given,
    )
