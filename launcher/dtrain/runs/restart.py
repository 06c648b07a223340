"""Decide whether a failed job restarts, and on which hosts. Pure.

A host that is unreachable or at fault is not used again: a spare takes its rank. Without a spare,
an elastic job continues without the host. A host that fails first in two attempts in a row counts
as at fault. A job that repeatedly fails at the same step would keep failing, so dtrain gives up,
even if ``job.restart.max`` allows more restarts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

from dtrain.hostlist import fold
from dtrain.records import dataclass
from dtrain.spec.elastic import differences
from dtrain.spec.model import ClusterFile, Elastic, Restart

SAME_STEP = 3
"""Attempts in a row that end at the same step before dtrain gives up."""
SOON = 120.0
"""Seconds in which a job that reports no steps has hardly begun."""
FIRST_DELAY, MOST_DELAY = 1.0, 60.0
"""Seconds before the second attempt, doubled before each later one."""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How one attempt ended."""

    ran: bool
    """Whether its workers started."""
    step: int | None
    """The last step it reported."""
    culprit: str | None
    """The host of the first failure."""
    why_last: str | None = None
    """Why no attempt may follow, whatever the policy; empty if the report already says it. None if
    one may."""
    lost: frozenset[str] = field(default_factory=frozenset)
    """Hosts that could not be reached, or whose hardware failed."""
    seconds: float = 0.0
    """How long it ran."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Start the next attempt."""

    delay: float
    """Seconds from now."""
    replaced: Mapping[str, str] = field(default_factory=dict)
    """Hosts that are no longer used, each with the spare that takes its rank."""
    dropped: tuple[str, ...] = ()
    """Hosts that are no longer used, without a replacement."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    why: str
    """A sentence; empty if the file asks for no restarts."""


def decide(
    policy: Restart,
    history: Sequence[AttemptResult],
    spares: Sequence[str],
    *,
    hosts: int,
    elastic: Elastic | None = None,
    fits: Callable[[str, str], bool] = lambda host, spare: True,
) -> Retry | GiveUp:
    """What to do after the last attempt of ``history``, which holds all attempts.

    ``hosts`` is the number of hosts left: those of the cluster file without the dropped ones.
    ``fits`` says whether a spare can run the ranks of a host.
    """
    last = history[-1]
    if policy.max == 0:
        return GiveUp("")
    if last.why_last is not None:
        return GiveUp(last.why_last)
    if not last.ran and not last.lost:
        return GiveUp("a job that a host refuses is not retried")
    if len(history) > policy.max:
        return GiveUp(f"it has been started {len(history)} times; job.restart.max is {policy.max}")
    if _stuck(history):
        where = "before the first step" if last.step is None else f"at step {last.step}"
        return GiveUp(f"the last {SAME_STEP} attempts all failed {where}")
    bad = [*sorted(last.lost)]
    repeated = len(history) > 1 and history[-2].culprit == last.culprit is not None
    if repeated and last.culprit not in last.lost:
        bad.append(str(last.culprit))
    replaced = _replaced(bad, spares, fits)
    rest = [host for host in bad if host not in replaced]
    dropped: list[str] = []
    if elastic is not None:
        left = hosts - len(last.lost.intersection(rest))
        if left < elastic.min_hosts:
            are = "host is" if left == 1 else "hosts are"
            return GiveUp(f"{left} {are} left, and job.elastic.min_hosts is {elastic.min_hosts}")
        # A host that is at fault but reachable stays in use if the job needs it.
        dropped = rest[: hosts - elastic.min_hosts]
    elif not last.ran and rest:
        return GiveUp(f"no spare is left to replace {fold(rest)}")
    delay = min(MOST_DELAY, FIRST_DELAY * 2.0 ** (len(history) - 1))
    return Retry(delay, replaced, tuple(dropped))


def _replaced(
    bad: Sequence[str], spares: Sequence[str], fits: Callable[[str, str], bool]
) -> dict[str, str]:
    left = list(spares)
    replaced = {}
    for host in bad:
        spare = next((spare for spare in left if fits(host, spare)), None)
        if spare is not None:
            left.remove(spare)
            replaced[host] = spare
    return replaced


def next_attempt(
    decision: Retry, number: int, before: ClusterFile, after: ClusterFile, listed: int
) -> str:
    """The line that announces attempt ``number``. The cluster file lists ``listed`` hosts."""
    was, now = ([host.name for host in spec.cluster.hosts] for spec in (before, after))
    gone = {*decision.dropped, *decision.replaced}
    idle = [host for host in was if host not in now and host not in gone]
    returned = [host for host in now if host not in was and host not in decision.replaced.values()]
    text = f"attempt {number} starts in {decision.delay:g} s"
    if decision.dropped:
        sizes = ", ".join([f"{len(now)} of {listed} hosts", *differences(before, after)])
        text += f" without {fold(decision.dropped)}: {sizes}"
    moves = [f"{spare} replaces {host}" for host, spare in decision.replaced.items()]
    parts = [
        text,
        f"{fold(idle)} idle, because the layout does not need it" if idle else "",
        f"{fold(returned)} in use again" if returned else "",
        ", ".join(moves),
    ]
    return "; ".join(filter(None, parts))


def _stuck(history: Sequence[AttemptResult]) -> bool:
    recent = [attempt for attempt in history[-SAME_STEP:] if attempt.ran and not attempt.lost]
    if len(recent) < SAME_STEP or len({attempt.step for attempt in recent}) > 1:
        return False
    # A job that reports no steps may have made progress in each attempt.
    return recent[0].step is not None or all(attempt.seconds < SOON for attempt in recent)
