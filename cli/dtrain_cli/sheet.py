"""The `Paper` of standard output, for commands that print tables."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from dtrain_cli.views import color
from dtrain_cli.views.outlet import Outlet

if TYPE_CHECKING:
    from dtrain_cli.views.paper import Paper


def stdout_paper() -> Paper:
    """Detect width, colors and characters. Without a terminal the width is COLUMNS, or 100."""
    # rich is slow to import, and only reports need it.
    from dtrain_cli.views.paper import Paper

    outlet = Outlet(sys.stdout)
    columns, _ = outlet.size()
    if not outlet.terminal:
        wanted = os.environ.get("COLUMNS", "")
        columns = int(wanted) if wanted.isdecimal() and len(wanted) < 6 else 100
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "")
    return Paper(
        columns,
        color=color(outlet),
        unicode=outlet.terminal and encoding == "utf8",
        terminal=outlet.terminal,
    )
