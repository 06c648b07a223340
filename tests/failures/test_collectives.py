"""Who keeps a collective waiting, from what flight recorders tell."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dtrain.failures.collectives import compare
from dtrain.messages.agent import Collectives, Happened, ProcessGroup, read_message
from dtrain.messages.decode import ProtocolError

MINE = ("step", "/home/ml/train.py", 40)
TORCHS = (
    "all_reduce",
    "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
    3245,
)


def call(
    seq: int, op: str = "nccl:all_reduce", *, done: bool = True, **what: Any
) -> dict[str, Any]:
    base = {"tensors": [["Float", [4, 3]]], "frames": []}
    return {"seq": seq, "op": op, "done": done, **base, **what}


def group(*calls: dict[str, Any], **what: Any) -> tuple[ProcessGroup, ...]:
    base = {"id": "0", "name": "default_pg", "ranks": [0, 1, 2, 3], "calls": calls}
    said = {"event": "collectives", "time": 0, "rank": 0, "groups": [{**base, **what}]}
    message = read_message({"type": "event", "offset": 1, "event": json.loads(json.dumps(said))})
    assert isinstance(message, Happened)
    assert isinstance(message.event, Collectives)
    return message.event.groups


def test_the_rank_that_has_not_joined() -> None:
    waits = group(call(13), call(14, done=False, frames=[TORCHS, MINE]))
    (line,) = compare({0: waits, 1: waits, 2: group(call(12), call(13)), 3: waits})
    assert line == (
        "rank 2 has not joined collective 14 of the default process group (all_reduce of"
        " Float[4, 3], called by step (/home/ml/train.py:40)); ranks 0-1, 3 have"
    )


def test_several_are_behind_those_that_are_far_ahead() -> None:
    ahead = group(*(call(seq, done=seq < 14) for seq in range(12, 20)))
    behind = group(call(13))
    (line,) = compare({0: ahead, 1: behind, 2: behind, 3: behind})
    assert line.startswith("ranks 1-3 have not joined collective 14 of")
    assert line.endswith("; rank 0 has")


def test_a_rank_that_has_called_nothing_in_the_group() -> None:
    waits = group(call(1, done=False), ranks=[])
    other = group(id="1", name="dp", ranks=[])
    assert compare({0: waits, 1: waits, 2: other})[0].startswith("collective 1 of the default")
    (line,) = compare({0: group(call(1, done=False)), 1: group(call(1, done=False)), 2: other})
    assert line.startswith("rank 2 has not joined collective 1 of the default process group")


def test_ranks_that_call_different_collectives() -> None:
    reduces, gathers = group(call(14, done=False)), group(call(14, "nccl:all_gather", done=False))
    (line,) = compare({0: reduces, 1: reduces, 2: gathers, 3: reduces})
    assert line == (
        "collective 14 of the default process group is not the same on all ranks:"
        " all_reduce of Float[4, 3] on ranks 0-1, 3; all_gather on rank 2"
    )


def test_ranks_that_pass_different_sizes() -> None:
    big, small = group(call(14, tensors=[["Float", [8]]], done=False)), group(call(14, done=False))
    (line,) = compare({0: big, 1: small})
    assert "all_reduce of Float[8] on rank 0; all_reduce of Float[4, 3] on rank 1" in line
    uneven = [group(call(3, "nccl:all_to_all", tensors=[["Float", [size]]])) for size in (2, 4)]
    assert compare(dict(enumerate(uneven))) == []


def test_all_have_joined_and_it_is_not_done() -> None:
    waits = group(call(14, done=False))
    (line,) = compare(dict.fromkeys(range(4), waits))
    assert line.endswith("is not done; all its ranks have joined: suspect the network between"
                         " them, or a GPU")  # fmt: skip
    (line,) = compare(dict.fromkeys(range(3), waits))
    assert line.endswith("is not done; no record from rank 3")


def test_nothing_is_said_of_groups_in_which_nobody_waits() -> None:
    tensor = group(call(7, done=False), id="5", name="tp", ranks=[0, 1])
    late = group(call(6), id="5", name="tp", ranks=[0, 1])
    records = {0: group(call(14)) + tensor, 1: group(call(13)) + late}
    assert [line.split(" (")[0] for line in compare(records)] == [
        "rank 1 has not joined collective 7 of process group tp"
    ]


@pytest.mark.parametrize("wrong", [{"calls": [{}]}, {"calls": 3}, {"ranks": ["x"]}])
def test_what_is_no_record(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=r"collectives\.groups\[0\]"):
        group(**wrong)
