"""Work for all hosts at once, which the user may stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain.checks import HostFacts
from dtrain.diagnostics import ConnectError
from dtrain.launchplan.build import build
from dtrain.launchplan.plan import HostPlan, LaunchPlan
from dtrain.session.facts import everywhere as everywhere_module
from dtrain.session.facts.everywhere import everywhere
from dtrain.session.facts.gather_order import QUICK, Depth, gather_order
from dtrain.session.facts.preflight import Preflight
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


def test_a_host_that_never_answers_fails_after_the_limit() -> None:
    over = threading.Event()
    (failure,) = everywhere(lambda part: over.wait(HANG), HOSTS[1:], 0.0)
    over.set()
    assert isinstance(failure, ConnectError)
    assert (failure.host, failure.reason) == ("b", "no answer within 0 s")


def test_the_limit_of_a_host_begins_with_its_call() -> None:
    calls: list[Callable[[], None]] = []

    def stopped() -> bool:
        if calls:
            calls.pop()()
        return False

    def run(part: HostPlan, call: Callable[[], None]) -> None:
        calls.append(call)

    assert everywhere(lambda part: part.host.name, HOSTS, 0.0, run, stopped=stopped) == ["a", "b"]


def test_time_in_which_the_launcher_stood_still_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After Ctrl-Z, or on a machine that was suspended, the answers are not read yet."""
    now, paused, go_on = 1000.0, threading.Event(), threading.Event()
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += paused.is_set()
        if looks == 5:
            go_on.set()
        return now

    def work(part: HostPlan) -> str:
        nonlocal now
        now += 3600
        paused.set()
        assert go_on.wait(HANG)
        return part.host.name

    monkeypatch.setattr(everywhere_module, "time", SimpleNamespace(monotonic=clock))
    assert everywhere(work, HOSTS[:1], 20.0) == ["a"]
    go_on.set()


def test_a_pause_before_a_call_adds_nothing_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks, over = 1000.0, 0, threading.Event()
    calls: list[Callable[[], None]] = []

    def stopped() -> bool:
        nonlocal now, looks
        looks += 1
        now += 3600 if looks == 1 else 0.5
        if looks == 3:
            threading.Thread(target=calls.pop(), daemon=True).start()
        assert looks < 20
        return False

    monkeypatch.setattr(everywhere_module, "time", SimpleNamespace(monotonic=lambda: now))
    (failure,) = everywhere(
        lambda part: over.wait(HANG),
        HOSTS[:1],
        1.0,
        lambda part, call: calls.append(call),
        stopped=stopped,
    )
    over.set()
    assert isinstance(failure, ConnectError)


class FewAnswer(Preflight):
    """Every tenth host answers. Records which hosts each of them dials."""

    def __init__(self, plan: LaunchPlan) -> None:
        super().__init__(plan, fail, base=Path())
        self.dialed: dict[str, list[str]] = {}

    def _gather(self, part: HostPlan, depth: Depth) -> tuple[HostFacts, int | None]:
        return (HostFacts(part, {}), 1) if part.node_rank % 10 == 0 else fail(part)

    def _dial(
        self, host: HostFacts, others: Sequence[HostFacts], ports: Mapping[str, int | None]
    ) -> HostFacts:
        self.dialed[host.name] = [other.name for other in others]
        return host


def fail(part: HostPlan) -> Any:
    raise ConnectError(part.host.name, "connecting", "it does not answer")


def test_a_host_dials_only_hosts_whose_names_it_has_looked_up() -> None:
    plan = build(parse(FILE.replace("a, b", '"n[000-199]"'), "c.yaml"))
    check = FewAnswer(plan)
    check.look(QUICK)
    assert len(check.dialed) == 20
    assert any(check.dialed.values())
    for part in plan.hosts:
        order = gather_order(plan, part, QUICK, token="", workdir=".")
        assert set(order["addresses"]) >= {*check.dialed.get(part.host.name, ())}
