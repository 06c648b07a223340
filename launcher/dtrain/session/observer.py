"""What a session tells whoever watches it. The CLI's views implement this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dtrain.checks import Finding
from dtrain.failures.cause import Report
from dtrain.launchplan.plan import LaunchPlan
from dtrain.runs.log_store import Stream
from dtrain.runs.progress import Progress


class Observer(Protocol):
    """All calls may come from any thread, and must return at once: a slow terminal never
    slows a run, because what is shown is read back from the stream's file."""

    def started(self, run: str, plan: LaunchPlan, folder: str) -> None:
        """The run has a name and a folder; nothing has been started on any host."""

    def attached(self, run: str, plan: LaunchPlan, folder: str) -> None:
        """Instead of `started`: the run was launched before."""

    def again(self, attempt: int, plan: LaunchPlan) -> None:
        """The job has failed and is started once more, as ``attempt``."""

    def host_state(self, host: str, state: str, detail: str = "") -> None:
        """A host is now ``connecting``, ``attaching``, ``checking``, ``syncing``, ``preparing``,
        ``ready``, ``running``, ``stopping``, or in its final state: ``ended`` (nothing of the run
        is left there), ``failed`` (it could not start), ``unreachable`` or ``lost`` (connected, but
        it did not say how the job ended). An ``unreachable`` host may come back."""

    def checked(self, findings: Sequence[Finding]) -> None:
        """What a look at the hosts has found, before anything is prepared on them. With an error
        among them the job is not started."""

    def notice(self, text: str) -> None:
        """Something a person should know: a port that was moved, a stop that was asked for."""

    def output(self, stream: Stream, size: int) -> None:
        """``stream.path`` now holds ``size`` bytes."""

    def skip(self, stream: Stream, size: int) -> None:
        """The first ``size`` bytes of ``stream.path`` are old, and not to be shown."""

    def progress(self, host: str, report: Progress) -> None:
        """A worker on ``host`` says how far it is."""

    def finished(self, report: Report) -> None:
        """The run is over and nothing more will come."""

    def left(self, run: str, *, goes_on: bool = True) -> None:
        """Instead of `finished`: the run goes on, but nothing more will be told of it."""


class Nobody:
    """An observer that does not look."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None
