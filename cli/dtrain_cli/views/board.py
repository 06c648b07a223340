"""The state of a run as the live view shows it. Pure: times are arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import field

from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.telemetry import GpuSample, Sample
from dtrain.records import dataclass
from dtrain.runs import events
from dtrain.runs.observed import ObservedAttempt, ObservedRun
from dtrain.runs.shown_state import BAD, ShownState
from dtrain.wording import counted
from dtrain_cli.views import names
from dtrain_cli.views.progress import ProgressLine
from dtrain_cli.views.troubles import GpuTrouble, are_busy, trouble

_ON_THE_WAY = tuple(each for each in ShownState if each not in BAD)
_CONNECTED = _ON_THE_WAY[_ON_THE_WAY.index(ShownState.SYNCING) :]
_MAX_NAMES = 3
TREND_STEP, MAX_TREND = 10.0, 60
"""Seconds between two points of the curve of the GPUs' use, and its most points."""
STALE = 5.0
"""Seconds after which a host's last sample is shown as old."""


@dataclass(slots=True)
class HostRow:
    """What is known of one host."""

    name: str
    job_gpus: Collection[int] = ()
    """Indices of the GPUs that the job uses; empty means all."""
    state: str = ""
    sample: Sample | None = None
    sampled: float = 0.0
    """When the sample arrived."""

    @property
    def gpus(self) -> list[GpuSample]:
        found = self.sample.gpus if self.sample is not None else ()
        return [gpu for gpu in found if not self.job_gpus or gpu.index in self.job_gpus]


@dataclass(slots=True)
class Board:
    run: str = ""
    began: float = 0.0
    workers: int = 0
    known: ObservedRun = field(default_factory=ObservedRun)
    hosts: dict[str, HostRow] = field(default_factory=dict)
    progress: ProgressLine = field(default_factory=ProgressLine)
    trend: list[float] = field(default_factory=list)
    """The mean use of the GPUs in percent, every `TREND_STEP` seconds, the last one last."""
    trend_due: float = 0.0
    hosts_known: bool = True
    """Whether the hosts have names, see `LaunchPlan.hosts_known`."""
    detail: str = ""
    """What a host's last state says, such as why the job is queued."""
    attended: bool = True
    """Whether a launcher is in charge of the run."""

    def on_event(self, event: events.RunEvent, now: float) -> bool:
        """Whether the board must be drawn before its clock moves on."""
        self.known.add(now, event)
        match event:
            case events.RunLaunched(run, plan) | events.RunAttached(run, plan):
                self.run = run
                self._expect(plan)
            case events.AttemptPlanned(plan) | events.HostsPlanned(plan):
                self._expect(plan)
            case events.HostState(host, state, detail) if host in self.hosts:
                self.hosts[host].state, self.detail = state, detail
                return True
            case events.ProgressReported(_, report):
                return self.progress.add(report)
            case events.Sampled(host, sample):
                self._sampled(host, sample, now)
        return False

    def _expect(self, plan: LaunchPlan) -> None:
        """The hosts and workers of a new attempt."""
        self.workers, self.hosts_known = plan.world_size, plan.hosts_known
        self.progress = ProgressLine()
        self.progress.expect(plan)
        self.hosts = {
            part.host.name: HostRow(part.host.name, part.host.gpus) for part in plan.hosts
        }

    @property
    def attempt(self) -> ObservedAttempt:
        return self.known.attempt

    def _sampled(self, host: str, sample: Sample, now: float) -> None:
        if host in self.hosts:
            self.hosts[host].sample, self.hosts[host].sampled = sample, now
        used = (
            [gpu.use for gpu in self.gpus() if gpu.use is not None] if now >= self.trend_due else []
        )
        if used:
            self.trend_due = now + TREND_STEP
            self.trend = [*self.trend, sum(used) / len(used)][-MAX_TREND:]

    @property
    def connected(self) -> bool:
        """Whether no host still waits for its first connection."""
        states = {host.state for host in self.hosts.values()}
        return bool(states) and states <= {*_CONNECTED, *BAD}

    def gpus(self) -> list[GpuSample]:
        return [gpu for host in self.hosts.values() for gpu in host.gpus]

    def troubles(self) -> dict[str, dict[int, GpuTrouble]]:
        """Problems by host and GPU. An idle GPU is a problem only while all hosts run: in a start
        or a stop, every GPU is idle."""
        states = {host.state for host in self.hosts.values()}
        busy = are_busy(self.gpus()) and states == {ShownState.RUNNING}
        found = {
            name: {
                gpu.index: one for gpu in host.gpus if (one := trouble(gpu, busy=busy)) is not None
            }
            for name, host in self.hosts.items()
        }
        return {name: gpus for name, gpus in found.items() if gpus}


def state(states: Iterable[str]) -> str:
    """One word for the whole run."""
    words = set(states)
    if len(words) > 1:
        words.discard(ShownState.UNREACHABLE)  # its workers go on
    if words & {ShownState.STOPPING, *BAD}:
        return "stopping"
    if ShownState.ENDED in words:
        return "ending"
    return words.pop() if words in ({ShownState.QUEUED}, {ShownState.RUNNING}) else "starting"


def summary(hosts: Mapping[str, str], workers: int) -> str:
    """``8 hosts running · 64 workers``, ``8 hosts: 7 running, gpu03 failed · 64 workers``."""
    groups: dict[str, list[str]] = {}
    for host, word in hosts.items():
        groups.setdefault(word, []).append(host)
    parts = [f"{len(groups[word])} {word}" for word in _ON_THE_WAY if word in groups]
    for word in BAD:
        if those := groups.get(word):
            who = names.brief(those) if len(those) <= _MAX_NAMES else str(len(those))
            parts.append(f"{who} {word}")
    waiting = len(groups.get("", ()))
    parts += [f"{waiting} waiting"] if waiting else []
    count = counted(len(hosts), "host")
    if len(groups) == 1 and (word := next(iter(groups))) not in BAD:
        text = f"{count} {word or 'waiting'}"
    else:
        text = f"{count}: {', '.join(parts)}"
    return f"{text} · {counted(workers, 'worker')}"
