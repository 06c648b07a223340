"""What a feed keeps for a receiver that takes nothing."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from dtrain.session.feed import MAX_CALLS, Feed
from support.limits import HANG


def test_progress_does_not_fill_the_memory_while_the_terminal_is_stopped() -> None:
    stopped, resumed = threading.Event(), threading.Event()
    shown: list[int] = []

    def notice(text: str) -> None:
        stopped.set()
        assert resumed.wait(HANG)

    receiver: Any = SimpleNamespace(
        limit=100,
        notice=notice,
        progress=lambda host, report: shown.append(report),
        flush=lambda now: None,
        next_flush=lambda now: None,
        suspend=lambda: None,
    )
    feed = Feed(receiver)
    feed.notice("first")
    assert stopped.wait(HANG)
    for number in range(MAX_CALLS + 100):
        report: Any = number
        feed.progress("host", report)
    resumed.set()
    feed.close()
    assert feed.wait(HANG)
    assert shown == [*range(MAX_CALLS)]
