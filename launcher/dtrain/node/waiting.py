"""Waits for the next item of a queue."""

from __future__ import annotations

import queue

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    _Item = TypeVar("_Item")


def next_item(items: queue.SimpleQueue[_Item], seconds: float) -> _Item:
    """As ``items.get(timeout=seconds)``, for the queue's only reader. Raises queue.Empty.

    Before Python 3.13, a short timeout may never end. The queue has a lock that is free after an
    item was taken without a wait. `get` then takes it at once, computes the time that is left, and
    waits forever if there is none. `get_nowait` takes the lock first.
    """
    try:
        return items.get_nowait()
    except queue.Empty:
        if seconds <= 0:
            raise
    return items.get(timeout=seconds)
