"""The cause below `torchrun` or `accelerate launch`, from what torch 2.13 writes."""

from __future__ import annotations

from dtrain.failures.launchers import root_words

OWN = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "train.py", line 19, in <module>
[rank3]:     step(batch)
[rank3]: ValueError: bad batch
"""
PEER = """\
[rank2]: Traceback (most recent call last):
[rank2]:   File "train.py", line 21, in <module>
[rank2]:     loss.backward()
[rank2]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:38546.
"""
EARLY = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    import absent
ModuleNotFoundError: No module named 'absent'
"""
LAUNCHER = """\
E1122 11:21:07.269000 48 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)
Traceback (most recent call last):
  File "bin/accelerate", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
====================================================
train.py FAILED
----------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 3 (local_rank: 1)
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
====================================================
"""


def words(text: str) -> list[str]:
    return root_words(text.encode(), uncaught=True).split("\n")


def test_the_rank_that_does_not_blame_a_peer() -> None:
    found = words(PEER + OWN + LAUNCHER)
    assert found[0] == "In rank 3 of the program:"
    assert found[-1] == "ValueError: bad batch"
    assert not any("rank2" in line for line in found)


def test_lines_of_ranks_that_alternate() -> None:
    both = zip(OWN.splitlines(), PEER.splitlines(), strict=True)
    mixed = "".join(f"{own}\n{peer}\n" for own, peer in both)
    assert words(mixed + LAUNCHER)[-1] == "ValueError: bad batch"


def test_a_peer_is_better_than_the_launcher() -> None:
    """So another host's own failure becomes the cause."""
    assert "Connection closed by peer" in words(PEER + LAUNCHER)[-1]


def test_before_torch_knows_the_rank() -> None:
    assert words(EARLY + LAUNCHER)[-1] == "ModuleNotFoundError: No module named 'absent'"


def test_a_launcher_whose_ranks_say_nothing() -> None:
    assert words(LAUNCHER)[-1].startswith("===")


def test_no_launcher() -> None:
    assert words(OWN)[-1] == "ValueError: bad batch"


def test_a_number_that_is_no_rank() -> None:
    """Python converts at most 4300 digits."""
    text = OWN.replace("rank3", f"rank{'9' * 5000}")
    assert words(text + LAUNCHER)[-1] == "ValueError: bad batch"
