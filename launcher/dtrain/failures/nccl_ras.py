"""Understand the status report of NCCL's RAS service. Pure.

The report of NCCL 2.24 to 2.30 on a communicator whose ranks differ::

    #0-0 (27a079b828ff1a75) MISMATCH
      Communicator ranks have different collective operation counts
      26 ranks have launched up to operation 6650
      6 ranks have launched up to operation 6649
      Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210

A group of one rank is one line: ``Rank 7 has launched up to operation 60 -- GPU 3 managed by …``.
Newer versions count each kind of operation. The ranks of the largest group are not listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import field

from dtrain.framing import clean
from dtrain.records import dataclass

MAX_LINES = 2000
MAX_FOUND = 8
_COMMUNICATOR = re.compile(r"#\d{1,9}-\d{1,9} \(([0-9a-f]{1,32})\)")
_KIND = re.compile(r"Communicator ranks have different (\w{1,40}) operation counts")
_GROUP = re.compile(
    r"(?:(\d{1,9}) ranks|Rank (\d{1,9})) (?:have|has)"
    r" (?:launched up to operation (\d{1,19})|not launched any operations)(?: -- (.{1,200}))?$"
)
_RANK = re.compile(r"Rank (\d{1,9}) -- (.{1,200})$")
_PROCESS = re.compile(r"process (\d{1,9}) on node (\S{1,100})$")
_MISSING = re.compile(r"Process (\d{1,9}) on node (\S{1,100}) managing GPUs? (\S{1,100})$")


@dataclass(slots=True)
class _Group:
    """Ranks of a communicator that have launched equally many operations."""

    operations: int
    size: int
    ranks: list[str] = field(default_factory=list)


def explain(text: str) -> list[str]:
    """One sentence for each communicator whose ranks differ, and for each process that does not
    answer NCCL. ``text`` comes from a host, which is not trusted."""
    return list(dict.fromkeys(_explained(text)))[:MAX_FOUND]


def _explained(text: str) -> Iterator[str]:
    communicator, kind = "", ""
    groups: list[_Group] = []
    for line in [*text.splitlines()[:MAX_LINES], "#"]:
        line = line.strip()
        if match := _GROUP.match(line):
            many, rank, operations, process = match.groups()
            groups.append(_Group(int(operations or 0), int(many or 1)))
            if rank is not None:
                groups[-1].ranks.append(_rank(rank, process or ""))
            continue
        if (match := _RANK.match(line)) and groups:
            groups[-1].ranks.append(_rank(*match.groups()))
            continue
        if len(groups) > 1:
            yield _difference(communicator, kind, groups)
        groups = []
        if match := _COMMUNICATOR.match(line):
            communicator = match[1]
        elif match := _KIND.match(line):
            kind = "" if match[1] == "collective" else f"{match[1]} "
        elif match := _MISSING.match(line):
            pid, node, gpu = map(clean, match.groups())
            yield f"NCCL: process {pid} on {node} (GPU {gpu}) does not answer"


def _rank(rank: str, process: str) -> str:
    found = _PROCESS.search(process)
    return f"rank {rank} (process {found[1]} on {clean(found[2])})" if found else f"rank {rank}"


def _difference(communicator: str, kind: str, groups: list[_Group]) -> str:
    least = min(groups, key=lambda group: group.operations)
    most = max(group.operations for group in groups)
    who = ", ".join(least.ranks[:MAX_FOUND])
    if least.size > len(least.ranks[:MAX_FOUND]):
        more = least.size - len(least.ranks[:MAX_FOUND])
        who = f"{who} and {more} more" if who else f"{least.size} ranks"
    verb = "has" if least.size == 1 else "have"
    return (
        f"NCCL: {who} of communicator {communicator} {verb} launched {least.operations}"
        f" {kind}operations, others up to {most}"
    )
