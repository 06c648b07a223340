"""The watchdog, without hosts."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain.session.hang_watch import HangWatch


def watching(then: str, **link: Any) -> tuple[HangWatch, list[str]]:
    """A watchdog that finds one host too quiet, and its notices."""
    notices: list[str] = []
    watchdog = SimpleNamespace(silence=0.0, then=then)
    plan = SimpleNamespace(job=SimpleNamespace(watchdog=watchdog))
    recorder = SimpleNamespace(notice=notices.append)
    context: Any = SimpleNamespace(plan=plan, recorder=recorder)
    usual = {"reachable": True, "reported_end": False}
    host: Any = SimpleNamespace(
        **usual | link,
        evidence=SimpleNamespace(last_activity=time.monotonic() - 1, stacks_complete=False),
        request_stacks=lambda abort, ras: None,
    )
    watch = HangWatch(context, {"a": host})
    watch.start()
    return watch, notices


@pytest.mark.parametrize(("then", "ends"), [("report", False), ("stop", True), ("restart", True)])
def test_a_failure_while_stacks_are_collected(then: str, ends: bool) -> None:
    """It is the cause, unless the job ends because of the hang."""
    watch, notices = watching(then)
    assert not watch.has_hung()
    (notice,) = notices
    assert notice.endswith("; collecting stacks")
    assert bool(watch.why) is ends


@pytest.mark.parametrize("over", [False, True])
def test_a_host_that_cannot_be_reached_says_nothing_unless_its_part_is_over(over: bool) -> None:
    """A host that was lost after its workers had finished stays unreachable."""
    watch, notices = watching("stop", reachable=False, reported_end=over)
    assert not watch.has_hung()
    assert len(notices) == over
