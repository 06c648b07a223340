"""Compare the ranks of a hanging job by torch's flight recorder. Pure.

All ranks of a process group call the same collectives in the same order, and torch numbers them.
The others wait for a rank that has called fewer. If two ranks called different collectives under
the same number, the job hangs or computes wrong results from there on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dtrain.failures.stacks import Frame, place
from dtrain.launchplan.names import name_ranks
from dtrain.messages.agent import Call, ProcessGroup

_SAME_SIZES = ("all_reduce", "broadcast", "reduce")
"""Collectives to which all ranks pass tensors of the same sizes."""


def compare(records: Mapping[int, Sequence[ProcessGroup]]) -> list[str]:
    """One line for each process group that does not progress. ``records`` is by rank."""
    groups: dict[str, dict[int, ProcessGroup]] = {}
    for rank, own in sorted(records.items()):
        for group in own:
            groups.setdefault(group.id, {})[rank] = group
    lines = [_compare(by_rank, records.keys()) for by_rank in groups.values()]
    return [line for line in lines if line]


def _compare(groups: Mapping[int, ProcessGroup], recorded: Collection[int]) -> str:
    members = sorted({*groups, *(rank for group in groups.values() for rank in group.ranks)})
    name = _name(next(iter(groups.values())))
    calls = {rank: {call.seq: call for call in group.calls} for rank, group in groups.items()}
    # A member with a record that lacks this group has called nothing in it.
    latest = {rank: max(calls.get(rank, {}), default=0) for rank in members if rank in recorded}
    if mismatch := _mismatch(calls):
        seq, kinds = mismatch
        what = "; ".join(f"{call} on {name_ranks(ranks)}" for call, ranks in kinds.items())
        return f"collective {seq} of {name} is not the same on all ranks: {what}"
    waiting = [rank for rank, own in calls.items() if any(not call.done for call in own.values())]
    if not waiting:
        return ""
    least = min(latest.values())
    behind = [rank for rank, seq in latest.items() if seq == least]
    if least < max(latest.values()):
        joined = [own[least + 1] for own in calls.values() if least + 1 in own]
        first = max(joined, key=lambda call: bool(_where(call)), default=None)
        others = [rank for rank in latest if rank not in behind]
        has = "has" if len(behind) == 1 else "have"
        return (
            f"{name_ranks(behind)} {has} not joined collective {least + 1} of {name}"
            f"{_details(first)}; {name_ranks(others)} {'has' if len(others) == 1 else 'have'}"
        )
    silent = [rank for rank in members if rank not in recorded]
    first = min(
        (call for own in calls.values() for call in own.values() if not call.done),
        key=lambda call: call.seq,
    )
    fate = (
        f"no record from {name_ranks(silent)}"
        if silent
        else "all its ranks have joined: suspect the network between them, or a GPU"
    )
    return f"collective {first.seq} of {name}{_details(first)} is not done; {fate}"


def _mismatch(calls: Mapping[int, Mapping[int, Call]]) -> tuple[int, dict[str, list[int]]] | None:
    """The first collective on which ranks differ, and the ranks of each kind of call."""
    for seq in sorted({seq for own in calls.values() for seq in own}):
        kinds: dict[str, list[int]] = {}
        for rank, own in calls.items():
            if seq in own:
                same_sizes = _op(own[seq]) in _SAME_SIZES
                kind = _described(own[seq]) if same_sizes else _op(own[seq])
                kinds.setdefault(kind, []).append(rank)
        if len(kinds) > 1:
            return seq, kinds
    return None


def _details(call: Call | None) -> str:
    if call is None:
        return ""
    by = f", called by {where}" if (where := _where(call)) else ""
    return f" ({_described(call)}{by})"


def _described(call: Call) -> str:
    """``all_reduce of Float[4, 3]``."""
    tensors = ", ".join(f"{kind}{list(sizes)}" for kind, sizes in call.tensors)
    return f"{_op(call)} of {tensors}" if tensors else _op(call)


def _op(call: Call) -> str:
    """The name without that of the backend: ``all_reduce``."""
    return call.op.partition(":")[2] or call.op


def _where(call: Call) -> str:
    """Where the script called it; empty if unknown."""
    return place([Frame(file, line, function) for function, file, line in call.frames]).script


def _name(group: ProcessGroup) -> str:
    if group.name in ("default_pg", "undefined", ""):
        return "the default process group" if group.id == "0" else f"process group {group.id}"
    return f"process group {group.name}"
