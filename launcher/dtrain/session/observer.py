"""The events that a session reports. The CLI's views implement this interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dtrain.checks import Finding
from dtrain.failures.cause import Report
from dtrain.failures.stalls import Stall
from dtrain.failures.stragglers import Straggler
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.telemetry import Sample
from dtrain.runs.log_store import Stream
from dtrain.runs.progress import Progress


class Observer(Protocol):
    """Calls may come from any thread and must return at once: a slow terminal never slows a run,
    because views read output back from the stream files."""

    def started(self, run: str, plan: LaunchPlan, folder: str) -> None:
        """The run has a name and a folder. No host has started anything yet."""

    def attached(self, run: str, plan: LaunchPlan, folder: str) -> None:
        """Replaces `started` for a run that was launched before."""

    def next_attempt(self, attempt: int, plan: LaunchPlan) -> None:
        """The job failed and restarts as ``attempt``."""

    def allocated(self, plan: LaunchPlan) -> None:
        """The engine has chosen the hosts; ``plan`` names them."""

    def host_state(self, host: str, state: str, detail: str = "") -> None:
        """A host is now in ``state``, a `dtrain.runs.shown_state.ShownState`."""

    def checked(self, findings: Sequence[Finding]) -> None:
        """Findings of the host check before the launch. With an error among them, the job does not
        start."""

    def notice(self, text: str) -> None:
        """A message for the user, such as a changed port or a stop request."""

    def output(self, stream: Stream, size: int) -> None:
        """``stream.path`` now holds ``size`` bytes."""

    def skip(self, stream: Stream, size: int) -> None:
        """Do not show the first ``size`` bytes of ``stream.path``: they are old."""

    def progress(self, host: str, report: Progress) -> None:
        """A worker on ``host`` reports its progress."""

    def telemetry(self, host: str, sample: Sample) -> None:
        """What ``host`` does now. Comes once a second from each host that runs."""

    def stragglers(self, found: Straggler | None) -> None:
        """The slow ranks have changed; None: no rank is slow any more."""

    def stall(self, found: Stall | None) -> None:
        """The job or other ranks stand still; None: the job goes on."""

    def finished(self, report: Report) -> None:
        """The run is over. No more calls follow."""

    def left(self, run: str, *, still_running: bool = True) -> None:
        """Replaces `finished` if the run continues. No more calls follow."""


class NullObserver:
    """An observer that ignores everything."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **keywords: None
