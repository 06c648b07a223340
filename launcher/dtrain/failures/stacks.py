"""Where the processes of a hanging job wait, from their stacks. Pure.

When peers wait in a collective, all but one of them have the same stack. The one with another
stack is usually the one they wait for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from dtrain.records import dataclass

_THREAD = re.compile(
    r"^(?P<current>Current t|T)hread 0x[0-9a-f].*\(most recent call first\):$", re.MULTILINE
)
_FRAME = re.compile(r'^  File "(?P<file>[^"\n]+)", line (?P<line>\d{1,9}) in (?P<function>.+)$')
_SPY_FRAME = re.compile(r"^ {4}(?P<function>[^(\n]+) \((?P<file>[^\n]+):(?P<line>\d{1,9})\)$")
_FOLDER = re.compile(r"\(.*/")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|\.zip/dtrain/runtime/|^<")
_WRAPPER = re.compile(r"\w*wrap\w*|inner|decorate_\w+|_fn|_?call_impl|__call__|error_handler")
"""Functions around the one that the script calls, from decorators and modules."""
_COLLECTIVES = "/torch/distributed/distributed_c10d.py"
_BUILD_LOCK = "/torch/utils/file_baton.py"
"""Torch's lock for the build of an extension: a file that stays if the builder is killed."""
MAX_GROUPS = 1000
"""Places that a report has. Hosts may invent more."""
MAX_STACKS = 100
"""Places with a stack."""
MAX_FRAMES, MAX_FRAME = 100, 500
"""Frames of a stack, and characters of one."""
_Who = TypeVar("_Who")


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True, slots=True)
class WaitingPlace:
    """Where one process waits."""

    call: str
    """The library function it is in; empty if it is in the script itself."""
    script: str
    """The innermost frame of the script's own code."""

    def __str__(self) -> str:
        if not self.script:
            return self.call or "an unknown place"
        return f"{self.call}, called by {self.script}" if self.call else self.script


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Workers in the same place."""

    workers: tuple[tuple[str, str], ...]
    """Label and host of each."""
    place: str
    frames: tuple[str, ...]
    """The stack of the first one's main thread, innermost frame first. Empty after `MAX_STACKS`."""


def stack(output: str) -> list[Frame]:
    """The main thread's frames, innermost first, from the last report in ``output``.

    Reads the output of Python's faulthandler and of ``py-spy dump``. Empty if there is neither.
    """
    heads = list(_THREAD.finditer(output))
    current = [head for head in heads if head["current"] != "T"]
    if not heads:
        return _frames(output.splitlines(), _SPY_FRAME)
    # In one report, the current thread is the one that received the signal: the main thread.
    head = current[-1] if current else heads[-1]
    lines = output[head.end() :].lstrip("\n").splitlines()
    return _frames(lines, _FRAME)


def _frames(lines: Iterable[str], pattern: re.Pattern[str]) -> list[Frame]:
    """The first run of lines that are frames."""
    frames: list[Frame] = []
    for line in lines:
        found = pattern.match(line)
        if found:
            # py-spy writes `Event.wait`, Python `wait`; hosts may use one or the other.
            function = found["function"].rpartition(".")[2]
            frames.append(Frame(found["file"], int(found["line"]), function))
        elif frames:
            break
    return frames


def place(frames: Sequence[Frame]) -> WaitingPlace:
    """Where these frames wait: the innermost frame of the user's code, if there is one."""
    own = next((frame for frame in frames if not _LIBRARY.search(frame.file)), None)
    above = frames if own is None else frames[: frames.index(own)]
    call = _call([frame.function for frame in reversed(above)])
    collective = next((f.function for f in reversed(above) if f.file.endswith(_COLLECTIVES)), "")
    if own is None:
        call = collective or (above[0].function if above else "")
    elif collective not in ("", call):
        call = f"{collective} in {call}"
    if any(frame.file.endswith(_BUILD_LOCK) for frame in above):
        call += (
            " (waits for another process that builds an extension of torch; if none does, remove"
            " the file `lock` that a killed build has left in ~/.cache/torch_extensions)"
        )
    return WaitingPlace(call, "" if own is None else str(own))


def _call(functions: Sequence[str]) -> str:
    """What the script calls, of the functions that it is in, outermost first."""
    outermost = functions[0] if functions else ""
    return next((name for name in functions if not _WRAPPER.fullmatch(name)), outermost)


def grouped(texts: Mapping[tuple[str, str], str]) -> tuple[StackGroup, ...]:
    """The workers in each place, most workers first. ``texts``: what py-spy shows of each worker,
    by its label and its host."""
    stacks = {who: stack(text) for who, text in texts.items()}
    places = compare({who: place(frames) for who, frames in stacks.items()})
    return tuple(
        StackGroup(tuple(those), str(where)[: 2 * MAX_FRAME], _shown(stacks[those[0]], number))
        for number, (where, those) in enumerate(places[:MAX_GROUPS])
    )


def _shown(frames: Sequence[Frame], number: int) -> tuple[str, ...]:
    """The frames of a group with this number."""
    return tuple(str(one)[:MAX_FRAME] for one in frames[:MAX_FRAMES] if number < MAX_STACKS)


def compare(places: Mapping[_Who, WaitingPlace]) -> list[tuple[WaitingPlace, list[_Who]]]:
    """Each place and who waits there, most processes first."""
    # The folder of one file may differ between hosts, for example their home folders.
    groups: dict[tuple[str, str], tuple[WaitingPlace, list[_Who]]] = {}
    for who, where in places.items():
        kind = where.call, _FOLDER.sub("(", where.script)
        groups.setdefault(kind, (where, []))[1].append(who)
    return sorted(groups.values(), key=lambda group: -len(group[1]))
