"""The state of each host of a job on Kubernetes, and why hosts without a pod wait."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from dtrain.engines.kubernetes.kinds import keys_of
from dtrain.engines.kubernetes.objects import KubernetesJobState, Pod
from dtrain.launchplan.plan import LaunchPlan
from dtrain.runs import events
from dtrain.runs.shown_state import ShownState
from dtrain.session.reporting.recorder import Recorder

SLOW_SECONDS = 10.0
"""Seconds after which a pod that does not start needs a reason."""


class HostStates:
    """Only the thread that follows the job calls it."""

    def __init__(self, plan: LaunchPlan, name: str, recorder: Recorder) -> None:
        """``name``: of the job."""
        self._hosts = plan.host_names
        self._queue = keys_of(plan).queue
        self._name = name
        self._recorder = recorder
        self._reasons: dict[str, str] = {}
        """Reasons of this suspension, by their kind."""
        self.suspended = False
        """Whether the job must wait, and its pods end."""
        self._before: frozenset[str] = frozenset()
        """Pods from before the suspension."""
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Forget the pods of the attempt before."""
        self._shown: dict[str, tuple[ShownState, str]] = {}
        self._last: dict[int, Pod] = {}
        """The last pod of each index. A job that was suspended has new ones."""
        self._seen: set[str] = set()
        self._gone: set[str] = set()
        self._set_aside: set[str] = set()
        """Pods that ended because the job was suspended."""
        self._preparing: dict[str, float] = {}
        """Times since which pods on a machine wait without a reason."""

    # What the server reports ---------------------------------------------------------------------

    def job(self, state: KubernetesJobState, reason: str) -> None:
        """``reason``: why a queue holds the job back, in its own words."""
        if state.suspended:
            self._hold(reason)
            return
        resumed, self.suspended = self.suspended, False
        if resumed:
            left = f"has left the queue {self._queue}" if self._queue else "is resumed"
            self._recorder.notice(f"{self._name} {left}")
        for host in self.absent:
            if resumed or self._shown.get(host, (None, ""))[1] == "":
                self._show(host, ShownState.QUEUED, "")

    def _hold(self, reason: str) -> None:
        if not self.suspended:
            self.suspended = True
            self._before = frozenset(self._seen)
            self._reasons.clear()
        for pod in self._last.values():
            self._set_aside_if_ended(pod)
        waits = f"waits in the queue {self._queue}" if self._queue else "is suspended"
        ran = "is suspended and " if self._last and self._queue else ""
        kind = _kind(reason)
        is_new = kind not in self._reasons
        reason = self._reasons.setdefault(kind, f": {reason}" if reason else "")
        if is_new:
            self._recorder.notice(f"{self._name} {ran}{waits}{reason}")
        for host in self.absent:
            detail = f"{waits.removeprefix('is ')}{reason}"
            self._show(host, ShownState.QUEUED, detail, quiet=True)

    def _set_aside_if_ended(self, pod: Pod) -> None:
        ended = pod.over or pod.uid in self._gone
        if self.suspended and ended and pod.uid in self._before:
            self._set_aside.add(pod.uid)

    def warned(self, text: str, name: str) -> None:
        """Kubernetes says why it does not create pods, or why the pod ``name`` does not start."""
        if not name:
            for host in self.absent:
                self._show(host, ShownState.QUEUED, text)
        elif name in self._preparing:
            for index, pod in self._last.items():
                if pod.name == name:
                    self._show(self._hosts[index], ShownState.PREPARING, text)

    def listed(self, pods: Iterable[Pod]) -> None:
        """All pods: the others are gone."""
        uids = {pod.uid for pod in pods}
        for pod in list(self._last.values()):
            if pod.uid not in uids and pod.uid not in self._gone:
                self.pod(pod, removed=True)

    def pod(self, pod: Pod, *, removed: bool) -> None:
        last = self._last.get(pod.index)
        if last is not None and last.uid != pod.uid:
            # A pod of the time before a suspension may end after its successor has begun.
            later = last.created >= pod.created if pod.uid in self._seen else False
            if later or last.created > pod.created:
                return
            self._preparing.pop(last.name, None)
        self._seen.add(pod.uid)
        self._last[pod.index] = pod
        if removed:
            self._gone.add(pod.uid)
        self._set_aside_if_ended(pod)
        if pod.state is ShownState.PREPARING and not pod.detail and not removed:
            self._preparing.setdefault(pod.name, time.monotonic())
        else:
            self._preparing.pop(pod.name, None)
        host = self._hosts[pod.index]
        self._show(host, ShownState.ENDED if removed else pod.state, pod.detail)
        if pod.disrupted and pod.uid not in self._set_aside:
            self._recorder.notice_once(f"{host}: pod {pod.name}: {pod.disrupted}")

    def ended(self) -> None:
        for host in self._hosts:
            self._show(host, ShownState.ENDED, "")

    # Questions -----------------------------------------------------------------------------------

    @property
    def slow_pod(self) -> str:
        """The name of a pod that has a machine and does not start, without a reason."""
        latest = time.monotonic() - SLOW_SECONDS
        return next((name for name, since in self._preparing.items() if since < latest), "")

    def counts(self, pod: Pod) -> bool:
        """Whether the end of the pod may be the end of the job."""
        last = self._last.get(pod.index)
        return last is not None and last.uid == pod.uid and pod.uid not in self._set_aside

    @property
    def absent(self) -> list[str]:
        """Hosts without a pod."""
        present = {
            index
            for index, pod in self._last.items()
            if pod.uid not in self._set_aside or pod.uid not in self._gone
        }
        return [host for index, host in enumerate(self._hosts) if index not in present]

    def _show(self, host: str, state: ShownState, detail: str, *, quiet: bool = False) -> None:
        if self._shown.get(host) == (state, detail):
            return
        self._shown[host] = state, detail
        self._recorder.record(events.HostState(host, state, detail))
        if detail and not quiet and state in (ShownState.QUEUED, ShownState.PREPARING):
            # Of all pods that wait for the same, the first one says so.
            self._recorder.notice_once(f"{host} waits: {detail}", kind=f"waits: {_kind(detail)}")


def _kind(reason: str) -> str:
    """Reasons that differ only in numbers are of one kind: the counts in the messages of a queue,
    and of the scheduler, change all the time."""
    return re.sub("[0-9]+", "0", reason)
