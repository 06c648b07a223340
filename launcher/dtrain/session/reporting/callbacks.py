"""Passes the events of a launch to the caller's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, ParamSpec, TypeAlias

from dtrain.failures.stalls import GOES_ON
from dtrain.failures.stragglers import RECOVERED
from dtrain.framing import split
from dtrain.launchplan import names
from dtrain.records import dataclass
from dtrain.runs import events
from dtrain.runs.log_store import Stream
from dtrain.runs.progress import Progress
from dtrain.session.reporting.feed import Feed, RunReceiver
from dtrain.session.stopping.control import Control

_P = ParamSpec("_P")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a worker's output."""

    host: str
    role: str
    """``worker``, ``torchrun``, or a TensorFlow task type such as ``ps``."""
    index: int
    """Number of the process among all of its role."""
    rank: int | None
    stream: Literal["stdout", "stderr"]
    text: str
    """The line that the worker wrote, without the newline; may contain escape sequences."""

    def __str__(self) -> str:
        label = names.label(self.role, self.index, self.rank)
        return f"[{self.host} {label}] {self.text}"


OnLine: TypeAlias = Callable[[Line], object]
OnState: TypeAlias = Callable[[str, str, str], object]
"""Host, state (a `dtrain.runs.shown_state.ShownState`) and a detail, often empty."""


class Callbacks(RunReceiver):
    """Calls the functions in the thread of its `feed`."""

    limit = 1 << 20

    def __init__(
        self,
        control: Control,
        on_line: OnLine | None,
        on_state: OnState | None,
        on_notice: Callable[[str], object] | None,
        on_progress: Callable[[Progress], object] | None,
    ) -> None:
        self._control = control
        self._on_line = on_line
        self._on_state = on_state
        self._on_notice = on_notice
        self._on_progress = on_progress
        self._error: BaseException | None = None
        self.feed = Feed(self, lambda stream: on_line is not None)

    def close(self) -> None:
        """Wait until every event has been passed on. Raises the first exception of a callback."""
        self.feed.close()
        self.feed.wait()
        if self._error is not None:
            raise self._error

    def on_event(self, event: events.RunEvent) -> None:
        match event:
            case events.HostState(host, state, detail):
                self._call(self._on_state, host, state, detail)
            case events.Findings(findings):
                for one in findings:
                    self._call(self._on_notice, f"{one.severity.value}: {one.subject}: {one.seen}")
            case events.NoticeShown(text) | events.TensorBoardAddress(_, text):
                self._call(self._on_notice, text)
            case events.ProgressReported(_, report):
                self._call(self._on_progress, report)
            case events.StragglersChanged(slow):
                self._call(self._on_notice, str(slow or RECOVERED))
            case events.StallChanged(stall):
                self._call(self._on_notice, str(stall or GOES_ON))

    def lines(self, stream: Stream, text: str, partial: str, second: int | None) -> None:
        for line in split(text):
            self._call(
                self._on_line,
                Line(stream.host, stream.role, stream.index, stream.rank, stream.fd, line),
            )

    def _call(self, act: Callable[_P, object] | None, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if act is None or self._error is not None:
            return
        try:
            act(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - `close` raises it in the caller's thread
            self._error = error
            self._control.stop(f"a callback failed: {type(error).__name__}: {error}")
