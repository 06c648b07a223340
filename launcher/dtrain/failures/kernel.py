"""Explain the end of a process from its host's kernel log. Pure.

The knowledge is data: ``kernel.yaml``, whose head explains its format.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from dtrain.failures.catalogue import knowledge
from dtrain.records import dataclass

_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<address>[0-9a-fA-F:.]{1,20})\): (?P<code>\d{1,5})"
    r"(?:, pid=(?P<pid>\d{1,10}))?"
)
RECENT = 60.0
"""Seconds before a failure in which a fault of the host is a likely cause."""


@dataclass(frozen=True, slots=True)
class KernelMessage:
    """A line of the kernel's log that reports a known problem."""

    id: str
    text: str
    """The line itself."""
    what: str
    """What happened, as a clause."""
    remedy: str
    time: float
    """Seconds since the epoch."""
    host: bool = False
    """Whether the host is at fault, so that another host would help."""
    weak: bool = False
    """Whether it is shown only if there is no better explanation."""
    pid: int | None = None
    """The process named in the line."""
    gpu: int | None = None
    """The GPU's number on that host, as ``nvidia-smi`` counts."""

    @property
    def out_of_memory(self) -> bool:
        """Whether the line reports that the OOM killer killed a process."""
        return self.id.endswith("out-of-memory-killer")


def understand(
    lines: Iterable[tuple[float, str]], addresses: Sequence[str], gpus: Collection[int]
) -> list[KernelMessage]:
    """The known problems in ``lines`` that concern a job on these ``gpus`` of the host.

    ``lines`` are pairs of time and text. ``addresses`` are the PCI addresses of all GPUs of the
    host, in the order of their numbers.
    """
    found = (_understand(line, time, addresses) for time, line in lines)
    return [
        message
        for message in found
        if message is not None and (not message.id.startswith("xid-") or _used(message, gpus))
    ]


def concerning(
    messages: Iterable[KernelMessage], pid: int | None, output: str, failed: float
) -> KernelMessage | None:
    """The message that best explains why process ``pid`` failed.

    ``output`` is the process's output, and ``failed`` is the time of its end. An older fault of the
    host is only a guess: it becomes weak and does not blame the host.
    """
    fitting = [
        replace(message, host=False, weak=True)
        if message.host and not _names(message, pid) and message.time < failed - RECENT
        else message
        for message in messages
        if _concerns(message, pid, output)
    ]
    return min(fitting, key=lambda message: message.weak, default=None)


def _concerns(message: KernelMessage, pid: int | None, output: str) -> bool:
    phrases = _phrases().get(message.id, ())
    if phrases:
        return any(phrase in output for phrase in phrases)
    return message.host or _names(message, pid)


def _names(message: KernelMessage, pid: int | None) -> bool:
    return message.pid is not None and message.pid == pid


def _used(message: KernelMessage, gpus: Collection[int]) -> bool:
    """Whether it may concern one of these GPUs."""
    return message.gpu in gpus if message.gpu is not None else bool(gpus)


def _understand(line: str, time: float, addresses: Sequence[str]) -> KernelMessage | None:
    if xid := _XID.search(line):
        return _xid(line, time, xid, addresses)
    for pattern, entry in _messages():
        if found := pattern.search(line):
            named = found.groupdict()
            what = entry["what"].format(**named)
            return _message(entry, line, time, entry["id"], what, named.get("pid"))
    return None


def _message(
    entry: dict[str, Any], line: str, time: float, id: str, what: str, pid: str | None
) -> KernelMessage:
    return KernelMessage(
        id=id,
        text=line,
        what=what,
        remedy=entry["remedy"],
        time=time,
        host=entry.get("host", False),
        weak=entry.get("weak", False),
        pid=int(pid) if pid is not None else None,
    )


def _xid(
    line: str, time: float, found: re.Match[str], addresses: Sequence[str]
) -> KernelMessage | None:
    code = int(found["code"])
    entry = knowledge("kernel.yaml")["xids"].get(code)
    if entry is None:
        return None
    # The driver omits the PCI function number, and older drivers the domain.
    at = found["address"].lower()
    numbers = [number for number, one in enumerate(addresses) if at in one.lower()]
    gpu = numbers[0] if len(numbers) == 1 else None
    name = f"GPU {gpu}" if gpu is not None else f"the GPU at {at}"
    what = f"{name} {entry['what']} (Xid {code})"
    return replace(_message(entry, line, time, f"xid-{code}", what, found["pid"]), gpu=gpu)


@cache
def _messages() -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    return [(re.compile(entry["pattern"]), entry) for entry in knowledge("kernel.yaml")["messages"]]


@cache
def _phrases() -> dict[str, list[str]]:
    return {entry["id"]: entry.get("says", []) for entry in knowledge("kernel.yaml")["messages"]}
