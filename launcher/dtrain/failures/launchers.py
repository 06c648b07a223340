"""The failure below a launcher that a job runs on each host: torchrun, or one that contains it such
as `accelerate launch`. Pure."""

from __future__ import annotations

import re
from dataclasses import replace

from dtrain.failures.catalogue import End, explain
from dtrain.failures.cause import Failure, signal_name
from dtrain.failures.traceback import STALE_AFTER, headline, last_words

_FAILED = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
"""How torchrun ends when one of its ranks failed; `accelerate launch` and others contain it."""
_HEADER = b"Traceback (most recent call last):"
_RANK = re.compile(rb"\[rank(\d{1,9})\]: ")
"""torch writes this before each line of a traceback, once a process group exists."""
_ROOT_CAUSE = (
    r"(?s)Root Cause \(first observed failure\):.{0,500}?\brank +: (\d{1,6}) .{0,200}?"
    r"exitcode +: (-?\d{1,3})\b"
)
"""The rank and the exit code in the summary that torchrun writes when a rank fails. Not compiled
here, because few jobs need it."""


def root_words(stderr: bytes, *, uncaught: bool, stale_after: int = STALE_AFTER) -> str:
    """`last_words`, or, if they are torchrun's report about its ranks, those of the rank that
    failed by itself.

    All ranks of a host share the stream of their launcher. The first rank whose traceback does not
    blame a peer comes before the others.
    """
    output = last_words(stderr, uncaught=uncaught, stale_after=stale_after)
    if _FAILED not in output:
        return output
    ranks = [
        f"In rank {rank} of the program:\n{words}" if rank is not None else words
        for rank, words in _tracebacks(stderr).items()
    ]
    own = [words for words in ranks if not _is_echo(words)]
    return (own or ranks or [output])[0]


def words_of_rank(stderr: bytes, rank: int) -> str:
    """The last traceback of a rank that writes to the stderr of its torchrun. Without a process
    group it has no number, and may be that of another rank. Empty if there is none."""
    found = _tracebacks(stderr)
    return found.get(rank) or found.get(None, "")


def _tracebacks(stderr: bytes) -> dict[int | None, str]:
    """The last traceback of each rank before torchrun's own one, in the order in which they begin.
    None: without a number."""
    lines = stderr.splitlines(keepends=True)
    headers = [number for number, line in enumerate(lines) if line.startswith(_HEADER)]
    end = headers[-1] if headers else 0
    streams: dict[bytes, list[bytes]] = {}
    for line in lines[:end]:
        prefix = _RANK.match(line)
        stream = streams.setdefault(prefix[1] if prefix else b"", [])
        stream.append(line[prefix.end() :] if prefix else line)
    found: dict[int | None, str] = {}
    for rank, stream in sorted(streams.items(), key=lambda item: not item[0]):
        words = last_words(b"".join(stream))
        if words.startswith("Traceback ("):
            found[int(rank) if rank else None] = words
    return found


def _is_echo(words: str) -> bool:
    known = explain(End(code=1, output=f"{headline(words)}\n{words}"))
    return known is not None and known.echo


def root_rank(failure: Failure, stderr: str) -> Failure:
    """The rank that torchrun blames in its summary, in place of torchrun."""
    root = re.search(_ROOT_CAUSE, stderr) if failure.role == "torchrun" else None
    if root is None:
        return failure
    rank, code = int(root[1]), int(root[2])
    return replace(
        failure,
        role="worker",
        index=rank,
        rank=rank,
        code=code if code >= 0 else None,
        signal=signal_name(-code),
    )
