"""Known ways to fail: how to recognize them, what they mean, and what to do. Pure.

The knowledge is data: ``signatures.yaml``, whose head explains its format. The output of a worker
is searched for phrases instead of regular expressions: a long or hostile text then costs a few
passes over it at most.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from dtrain.records import dataclass

MOST = 1 << 16
"""Characters searched at the end of a text, where the reason is."""

FROM_OUTSIDE = {"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"}
"""Signals from outside the process: its earlier output does not explain its end."""

_HANDLING = "During handling of the above exception, another exception occurred:"


class Phrase:
    """Words that occur in one line in this order. ``*`` matches anything between them.

    A leading ``^`` anchors the phrase at the start of the line.
    """

    def __init__(self, text: str) -> None:
        self._at_start = text.startswith("^")
        self._first, *self._rest = text.removeprefix("^").split("*")

    def occurs_in(self, text: str) -> bool:
        """Whether a line of ``text`` contains the phrase. Reads each line once."""
        at = text.find(self._first)
        while at >= 0:
            stop = text.find("\n", at)
            stop = len(text) if stop < 0 else stop
            if (not self._at_start or at == 0 or text[at - 1] == "\n") and self._continues(
                text, at + len(self._first), stop
            ):
                return True
            at = text.find(self._first, stop)
        return False

    def _continues(self, text: str, at: int, stop: int) -> bool:
        for part in self._rest:
            at = text.find(part, at, stop)
            if at < 0:
                return False
            at += len(part)
        return True


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended: the facts that may explain why."""

    code: int | None = None
    signal: str | None = None
    out_of_memory: bool = False
    """Whether the kernel's OOM killer killed a process on that host at that time."""
    output: str = ""
    """All of its output about its end, and the message of its last exception."""


@dataclass(frozen=True, slots=True)
class Signature:
    """One known way to fail. An end matches if it meets every condition given here."""

    id: str
    what: str
    """What happened, as a clause."""
    remedy: str
    says: tuple[Phrase, ...] = ()
    """At least one of these occurs in the output."""
    signals: tuple[str, ...] = ()
    codes: tuple[int, ...] = ()
    out_of_memory: bool = False
    whole: re.Pattern[str] | None = None
    """Matches the whole output."""
    echo: bool = False
    """Whether another process's failure usually causes this one."""
    host: bool = False
    """Whether the host is at fault, so that another host would help."""
    lasting: bool = False
    """Whether the program never began its work, so that a restart of a new job cannot help."""
    details: re.Pattern[str] | None = None
    """Finds figures in the output, for ``precisely``."""
    precisely: str = ""
    """Replaces ``what`` if ``details`` matches."""

    def fits(self, end: End, text: str) -> bool:
        """Whether ``end`` is of this kind. ``text`` is the part of the output to search."""
        if self.signals:
            if end.signal not in self.signals:
                return False
        elif end.signal in FROM_OUTSIDE or (self.echo and end.signal not in (None, "SIGABRT")):
            # A crash such as a segmentation fault is the process's own fault, whatever errors its
            # peers caused before. A library that gives up because of a peer calls abort().
            return False
        return (
            (not self.codes or end.code in self.codes)
            and (not self.out_of_memory or end.out_of_memory)
            and (not self.says or any(phrase.occurs_in(text) for phrase in self.says))
            and (self.whole is None or self.whole.fullmatch(text.strip("\n")) is not None)
        )

    def describe(self, text: str) -> str:
        """What happened, with the figures found in ``text``."""
        found = self.details.search(text) if self.details is not None else None
        return self.precisely.format(**found.groupdict()) if found is not None else self.what


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the catalogue knows about one failure."""

    id: str
    """The signature's."""
    what: str
    remedy: str
    echo: bool
    host: bool
    lasting: bool = False


# Thousands of ranks of one run fail with the same output, and callers ask several times for each.
@lru_cache(maxsize=4096)
def explain(end: End) -> Explanation | None:
    """The first signature that fits, if any. A process's own faults come before echoes.

    The last exception and its causes count more than an exception that was being handled.
    """
    output = end.output[-MOST:]
    last = output.rpartition(_HANDLING)[2]
    for echo, text in ((False, last), (False, output), (True, output)):
        for known in signatures():
            if known.echo is echo and known.fits(end, text):
                what = known.describe(output)
                remedy, echo, host = known.remedy, known.echo, known.host
                return Explanation(known.id, what, remedy, echo, host, known.lasting)
    return None


@cache
def knowledge(file: str) -> Any:
    """The content of a YAML file beside this module."""
    source = Path(__file__).with_name(file).read_text(encoding="utf-8")
    return yaml.load(source, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506


@cache
def signatures() -> tuple[Signature, ...]:
    """The catalogue, in search order."""
    return tuple(_signature(entry) for entry in knowledge("signatures.yaml"))


def _signature(entry: Mapping[str, Any]) -> Signature:
    given = dict(entry)
    details, whole = given.pop("details", None), given.pop("whole", None)
    return Signature(
        says=tuple(Phrase(text) for text in given.pop("says", ())),
        signals=tuple(given.pop("signals", ())),
        codes=tuple(given.pop("codes", ())),
        details=re.compile(details) if details is not None else None,
        whole=re.compile(whole) if whole is not None else None,
        **given,
    )
