"""Reports of NCCL's RAS service, as its documentation shows them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dtrain.failures.nccl_ras import MAX_FOUND, explain
from support.ras import HEAD, MISMATCH

LISTED = """\
#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  26 ranks have launched up to operation 6650
  6 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
  Rank 2 -- GPU 2 managed by process 483074 on node 172.16.64.210
  Rank 3 -- GPU 3 managed by process 483075 on node 172.16.64.210
  Rank 4 -- GPU 4 managed by process 483076 on node 172.16.64.210
  Rank 5 -- GPU 5 managed by process 483077 on node 172.16.64.210
  Rank 7 -- [process information not found]
"""
INCOMPLETE = """\
#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 172.16.64.213 managing GPU 5

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5
"""
NOTHING = """\
#1-3 (ab) MISMATCH
  Communicator ranks have different Broadcast operation counts
  2 ranks have launched up to operation 1
  2 ranks have not launched any operations
"""


def test_a_rank_that_has_launched_less() -> None:
    (line,) = explain(MISMATCH)
    assert line == (
        "NCCL: rank 2 (process 1650386 on 10.0.0.2) of communicator 27a079b828ff1a75 has launched"
        " 60 AllReduce operations, others up to 64"
    )


def test_several_ranks() -> None:
    (line,) = explain(HEAD + LISTED)
    assert line.startswith("NCCL: rank 0 (process 483072 on 172.16.64.210), rank 2 (")
    assert line.endswith(
        ", rank 7 of communicator 27a079b828ff1a75 have launched 6649 operations, others up to 6650"
    )
    assert explain(HEAD + NOTHING) == [
        "NCCL: 2 ranks of communicator ab have launched 0 Broadcast operations, others up to 1"
    ]


def test_a_process_that_does_not_answer_is_named_once() -> None:
    gone = "NCCL: process 3487984 on 172.16.64.213 (GPU 5) does not answer"
    assert explain(HEAD + INCOMPLETE) == [gone]


def test_a_healthy_job() -> None:
    assert explain(HEAD.replace("MISMATCH", "OK")) == []


@given(
    st.lists(
        st.one_of(
            st.text(max_size=200),
            st.sampled_from((MISMATCH + LISTED + INCOMPLETE + NOTHING).splitlines()),
        )
    )
)
def test_any_text_is_harmless(lines: list[str]) -> None:
    found = explain("\n".join(lines))
    assert len(found) <= MAX_FOUND
    assert all(line.isprintable() and len(line) < 4000 for line in found)
