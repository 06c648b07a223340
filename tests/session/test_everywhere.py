"""Work for all hosts at once, which the user may stop."""

from __future__ import annotations

import threading

import pytest

from dtrain.launchplan.plan import HostPlan, build
from dtrain.session.preflight import everywhere
from dtrain.spec.load import parse
from support.limits import HANG

FILE = "cluster: {hosts: [a, b], gpus: 1}\njob: {framework: none, script: train.py}\n"
HOSTS = build(parse(FILE, "c.yaml")).hosts


def test_a_host_that_does_not_answer_does_not_delay_a_stop() -> None:
    started, over = threading.Event(), threading.Event()

    def work(part: HostPlan) -> None:
        started.set()
        assert over.wait(HANG)

    with pytest.raises(KeyboardInterrupt):
        everywhere(work, HOSTS, HANG, stopped=started.is_set)
    over.set()


def test_work_that_is_stopped_may_clean_up() -> None:
    stopped, cleaned = threading.Event(), []

    def work(part: HostPlan) -> None:
        stopped.set()
        cleaned.append(part.host.name)

    with pytest.raises(KeyboardInterrupt):
        everywhere(work, HOSTS, HANG, stopped=stopped.is_set, ending=HANG)
    assert sorted(cleaned) == ["a", "b"]


def test_a_failure_after_a_stop_is_no_bug() -> None:
    """Ctrl-C also reaches the programs that this process has started."""
    stopped = threading.Event()

    def work(part: HostPlan) -> None:
        stopped.set()
        raise ValueError(part.host.name)

    with pytest.raises(KeyboardInterrupt):
        everywhere(work, HOSTS, HANG, stopped=stopped.is_set, ending=HANG)
    stopped.clear()
    with pytest.raises(ValueError, match=r"a|b"):
        everywhere(work, HOSTS, HANG)
