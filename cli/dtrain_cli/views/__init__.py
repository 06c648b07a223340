"""The views of a run, for users and programs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO

from dtrain.session.feed import Receiver
from dtrain_cli.views.outlet import Outlet
from dtrain_cli.views.view import Filters, View

__all__ = ["Filters", "View", "can_redraw", "color", "make_view"]


def make_view(
    json: bool,
    stdout: TextIO | None,
    stderr: TextIO | None,
    filters: Filters,
    fold: bool,
    on_broken_pipe: Callable[[], None],
    live: bool = True,
) -> View:
    """Start and return the view that fits the output streams.

    - ``json``: JSON Lines on stdout, nothing on stderr.
    - stderr is a terminal that can move its cursor, and stdout is not a pipe: log lines above a
      live header. (A pipe's reader, such as ``tee``, often writes to the same terminal.)
    - otherwise: plain lines.

    Without ``live``, there is no header. ``on_broken_pipe`` is called once, from another thread,
    when the reader of stdout or stderr is gone.
    """

    def display(broken: Callable[[OSError], None]) -> Receiver:
        out, err = Outlet(stdout, broken), Outlet(stderr, broken)
        if json:
            from dtrain_cli.views.json_lines import JsonLines

            return JsonLines(out)
        from dtrain_cli.views.plain import Plain

        kind = Plain
        if live and can_redraw(err.terminal) and not out.pipe:
            from dtrain_cli.views.live import Live

            kind = Live
        return kind(out, err, fold=fold, color=(color(out), color(err)))

    return View(display, filters, on_broken_pipe)


def color(outlet: Outlet) -> bool:
    """Whether to write in color. See https://no-color.org and https://force-color.org."""
    environment = os.environ
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR"):
        return True
    return can_redraw(outlet.terminal)


def can_redraw(terminal: bool) -> bool:
    """Whether a terminal, if the output is one, understands escape sequences."""
    return terminal and os.environ.get("TERM", "dumb") != "dumb"
