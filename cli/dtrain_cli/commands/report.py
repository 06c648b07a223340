"""`dtrain report`: what a run did, what it cost, and whether its plan was right."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Annotated

from dtrain.diagnostics import UsageError
from dtrain.runs.status import find_run
from dtrain.runs.summary import summary
from dtrain_cli import completion, output
from dtrain_cli.output import stdout_paper
from dtrain_cli.parameters import AnyRun, argument, flag, option
from dtrain_cli.views import summary as view


def report(
    run: AnyRun,
    other: Annotated[
        str | None, argument("Another run, to compare.", "OTHER", completion.runs)
    ] = None,
    json: Annotated[bool, flag("One JSON object.", "--json")] = False,
    html: Annotated[Path | None, option("Write an HTML page with charts.", "FILE")] = None,
) -> None:
    """Show what a run did, where its time went, and whether its plan was right."""
    if other is not None and html is not None:
        raise UsageError("--html is for one run", hint="leave the second run out")
    if html is not None:
        from dtrain_cli.files import HTML, writable

        writable(html, HTML)
    now = time.time()
    # A long run has millions of values, all of them needed until the end.
    gc.disable()
    found = [summary(find_run(name), now) for name in (run, other) if name is not None]
    if html is not None:
        from dtrain_cli.files import write_text
        from dtrain_cli.views.summary_html import page

        write_text(html, page(found[0]))
    if json:
        output.write(view.as_json(found))
    elif other is not None:
        output.write(view.comparison(found[0], found[1], stdout_paper()))
    else:
        written = [f"{html}: a page with charts"] if html is not None else []
        output.write(view.as_text(found[0], stdout_paper(), written))
