"""The placement of TensorFlow's tasks on hosts that differ."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.environ.placement import gpus_of_trainers, place_tasks, trains

HOSTS = st.lists(st.integers(0, 8), min_size=1, max_size=12)
ROLES = st.fixed_dictionaries(
    {
        "chief": st.integers(0, 1),
        "worker": st.integers(0, 40),
        "ps": st.integers(0, 6),
        "evaluator": st.integers(0, 1),
    }
)


@given(ROLES, HOSTS)
def test_every_task_is_placed_and_every_gpu_is_used(roles: dict[str, int], gpus: list[int]) -> None:
    placed = place_tasks(roles, gpus)
    assert Counter(role for role, _, _ in placed) == Counter(roles)
    on = Counter(host for role, _, host in placed if trains(role, roles))
    for host, tasks in on.items():
        # A task shares a GPU or runs without one only if no GPU is free.
        if tasks > gpus[host]:
            assert all(on[other] >= count for other, count in enumerate(gpus))
    if any(gpus) and not all(gpus):
        assert not any(gpus[host] for role, _, host in placed if role == "ps")


@given(HOSTS.filter(any))
def test_with_a_worker_for_each_gpu_each_has_one_gpu(gpus: list[int]) -> None:
    assert set(gpus_of_trainers({"worker": sum(gpus)}, gpus)) == {1}


@pytest.mark.parametrize("gpus", [[0, 0, 0], [8, 8, 8]])
def test_equal_hosts_take_turns(gpus: list[int]) -> None:
    placed = place_tasks({"worker": 5}, gpus)
    assert [host for _, _, host in placed] == [0, 1, 2, 0, 1]
