"""The paper that standard output is: found out once, where a command writes tables."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from dtrain_cli.views import color
from dtrain_cli.views.outlet import Outlet

if TYPE_CHECKING:
    from dtrain_cli.views.paper import Paper


def stdout_paper() -> Paper:
    """Its width, colors and characters; without a terminal COLUMNS decides, else 100 columns."""
    # Only a report needs rich, which takes a while to import.
    from dtrain_cli.views.paper import Paper

    outlet = Outlet(sys.stdout, lambda _error: None)
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
