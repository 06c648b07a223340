"""The views of a run, for users and programs."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, TextIO

from dtrain.records import dataclass
from dtrain_cli.views.outlet import Outlet

if TYPE_CHECKING:
    from dtrain.runs.log_store import Stream
    from dtrain.session.reporting.feed import RunReceiver
    from dtrain_cli.views.view import View

__all__ = ["Display", "Filters", "can_redraw", "color", "make_view"]


class Display(str, Enum):
    """How to show a run."""

    PLAIN = "plain"
    LIVE = "live"
    QUIET = "quiet"


@dataclass(frozen=True, slots=True)
class Filters:
    """The workers whose output is shown; None shows all. Log files always have all output."""

    ranks: frozenset[int] | None = None
    hosts: frozenset[str] | None = None

    def show(self, stream: Stream) -> bool:
        return (self.hosts is None or stream.host in self.hosts) and (
            self.ranks is None or stream.rank in self.ranks
        )


def make_view(
    stdout: TextIO | None,
    stderr: TextIO | None,
    filters: Filters,
    on_broken_pipe: Callable[[], None],
    *,
    json: bool = False,
    fold: bool = False,
    display: Display | None = None,
    timestamps: bool = False,
    by_arrival: bool = False,
) -> View:
    """Start and return the view that fits the output streams.

    - ``json``: JSON Lines on stdout, nothing on stderr.
    - ``display``, if given. Without a terminal for a dashboard, ``LIVE`` is the same as ``PLAIN``.
    - stderr is a terminal that can move its cursor, and stdout is not a pipe: a dashboard. (A
      pipe's reader, such as ``tee``, often writes to the same terminal.)
    - otherwise: plain lines.

    ``by_arrival``: sort stored output of several workers by its arrival.

    ``on_broken_pipe`` is called once, from another thread, when the reader of stdout or stderr is
    gone.
    """

    # Commands that show no run use the other functions of this module.
    from dtrain_cli.views.view import View

    def receiver(broken: Callable[[OSError], None]) -> RunReceiver:
        out, err = Outlet(stdout, broken), Outlet(stderr, broken)
        if json:
            from dtrain_cli.views.json_lines import JsonLines

            return JsonLines(out)
        from dtrain_cli.views.plain import Plain, Quiet

        kind: type[Plain] = Plain
        able = can_redraw(err.terminal) and err.unicode and not out.pipe
        if display is Display.QUIET:
            kind = Quiet
        elif display is not Display.PLAIN and able:
            from dtrain_cli.views.live import Live

            kind = Live
        colors = color(out.terminal), color(err.terminal)
        return kind(out, err, fold=fold, timestamps=timestamps, color=colors)

    return View(receiver, filters, on_broken_pipe, by_arrival=by_arrival)


def color(terminal: bool) -> bool:
    """Whether to write in color. See https://no-color.org and https://force-color.org."""
    environment = os.environ
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR"):
        return True
    return can_redraw(terminal)


def can_redraw(terminal: bool) -> bool:
    """Whether a terminal, if the output is one, understands escape sequences."""
    return terminal and os.environ.get("TERM", "dumb") != "dumb"
