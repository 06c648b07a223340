"""The names of a job's processes in files, messages and reports. Pure.

Shipped to nodes: Python 3.8, standard library only.
"""

from __future__ import annotations

from dtrain.wording import plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

_NAMED = 4
"""Processes that a sentence names."""


def process_name(role: str, index: int) -> str:
    """The name of a process that dtrain starts, in files and messages: ``worker-3``."""
    return f"{role}-{index}"


def rank_name(rank: int) -> str:
    """The name of a rank where it may not be a process that dtrain starts: ``rank-3``."""
    return f"rank-{rank}"


def reporter_name(role: str, index: int, rank: int | None) -> str:
    """The name under which a process reports its steps: ``rank-3``, or ``ps-1`` without a rank."""
    return process_name(role, index) if rank is None else rank_name(rank)


def parsed(name: str) -> tuple[str, int]:
    """The role, or ``rank``, and the number in a name. Raises ValueError for other text."""
    role, _, number = name.rpartition("-")
    return role, int(number)


def label(role: str, index: int, rank: int | None) -> str:
    """Short name in front of output: the rank, or role and index such as ``ps1``."""
    return str(rank) if rank is not None else f"{role}{index}"


def name_processes(names: Sequence[str]) -> str:
    """Names in a sentence: ``rank 3, rank 5 and 2 more``."""
    shown = ", ".join(name.replace("-", " ", 1) for name in names[:_NAMED])
    more = len(names) - _NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def name_ranks(ranks: Collection[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    return f"{plural(len(ranks), 'rank')} {fold_numbers(ranks, ', ')}"


def fold_numbers(numbers: Iterable[int], separator: str = ",") -> str:
    """Ranks, or indices of GPUs: ``0-2,5``."""
    ranges: list[tuple[int, int]] = []
    for number in sorted({*numbers}):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return separator.join(
        f"{first}-{last}" if first < last else f"{first}" for first, last in ranges
    )
