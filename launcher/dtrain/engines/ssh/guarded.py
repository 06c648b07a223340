"""Threads in which a bug must end the run."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from dtrain.diagnostics import DtrainError, InternalError, LimitError


def run_guarded(name: str, work: Callable[[], None], report: Callable[[Exception], None]) -> None:
    """Run ``work`` in a thread. Call ``report`` with what it raises, or if no thread starts."""

    def guarded() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001
            report(error)

    try:
        threading.Thread(target=guarded, name=name, daemon=True).start()
    except RuntimeError as error:
        report(error)


def fault(error: Exception, folder: Path) -> DtrainError:
    """The error for the user. For a bug, the traceback goes to the run's ``folder``."""
    if limit := LimitError.of(error):
        return limit
    file = folder / "fault.txt"
    with contextlib.suppress(OSError):
        text = "".join(traceback.format_exception(error))
        file.write_text(text, "utf-8", "backslashreplace")  # a name that is not UTF-8
    return InternalError(f"a bug in dtrain; please report the file {file}")
