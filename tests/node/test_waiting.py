"""The next item of a queue, with a time limit."""

from __future__ import annotations

import queue

import pytest

from dtrain.node.waiting import next_item


def test_an_item_that_is_there_comes_at_once() -> None:
    items = queue.SimpleQueue[int]()
    items.put(1)
    items.put(2)
    assert [next_item(items, -1.0), next_item(items, 0.0)] == [1, 2]


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 1e-7])
def test_a_time_that_is_over_ends_each_wait(seconds: float) -> None:
    """Of 20,000 calls of `SimpleQueue.get` some do not end on Python 3.10 to 3.12."""
    items = queue.SimpleQueue[int]()
    for number in range(20_000):
        items.put(number)
        assert next_item(items, 0.0) == number
        with pytest.raises(queue.Empty):
            next_item(items, seconds)
