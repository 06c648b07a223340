"""The watchdog, without hosts."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain.session.hang_watch import HangWatch


@pytest.mark.parametrize(("then", "ends"), [("report", False), ("stop", True), ("restart", True)])
def test_a_failure_while_stacks_are_collected(then: str, ends: bool) -> None:
    """It is the cause, unless the job ends because of the hang."""
    notices: list[str] = []
    watchdog = SimpleNamespace(silence=0.0, then=then)
    plan = SimpleNamespace(job=SimpleNamespace(watchdog=watchdog))
    recorder = SimpleNamespace(notice=notices.append)
    context: Any = SimpleNamespace(plan=plan, recorder=recorder)
    link: Any = SimpleNamespace(
        reachable=True,
        reported_end=False,
        evidence=SimpleNamespace(last_activity=time.monotonic() - 1, stacks_complete=False),
        request_stacks=lambda abort, ras: None,
    )
    watch = HangWatch(context, {"a": link})
    watch.start()
    assert not watch.has_hung()
    (notice,) = notices
    assert notice.endswith("; collecting stacks")
    assert bool(watch.why) is ends
