"""Removes the folders of old runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from dtrain.diagnostics import DtrainError, UsageError
from dtrain.node.descriptors import closing_fd
from dtrain.node.trust import Trust
from dtrain.records import dataclass
from dtrain.runs.folder import RunFolder
from dtrain.runs.record import Record
from dtrain.runs.status import RunStatus
from dtrain.runs.storage import home, storing

USUAL_AGE = 30 * 86400.0
"""Seconds since the end of a run."""
REMOVED = ".removed-"
"""Prefix of a folder while its files are removed. No command takes it for a run."""


@dataclass(frozen=True, slots=True)
class OldRun:
    run: RunStatus
    size: int
    """Bytes on disk."""


def old_runs(
    runs: Sequence[RunStatus], now: float, *, older_than: float | None, keep: int | None
) -> list[RunStatus]:
    """The runs to remove: those that are over, ended more than ``older_than`` seconds ago, and are
    not among the latest ``keep`` of them. Pure.

    Without both, the age is `USUAL_AGE`. A run without an end is never among them: it runs, has no
    launcher, or cannot be read.
    """
    if older_than is None:
        older_than = 0.0 if keep is not None else USUAL_AGE
    over = [run for run in runs if run.report is not None and not run.active]
    over.sort(key=_end)
    return [run for run in over[: max(0, len(over) - (keep or 0))] if now - _end(run) > older_than]


def _end(run: RunStatus) -> float:
    return run.started + (run.report.seconds or 0.0 if run.report is not None else 0.0)


def sizes(runs: Sequence[RunStatus]) -> list[OldRun]:
    """The runs with their sizes; without those that `remove` refuses."""
    found = []
    for run in runs:
        with contextlib.suppress(DtrainError, OSError):
            _check(run)
            found.append(OldRun(run, _size(Path(run.folder))))
    return found


def remove(run: RunStatus) -> None:
    """Remove the folder of a run that is over.

    Raises UsageError if it is not over for certain, or not the user's own folder, and StorageError
    if files cannot be removed.
    """
    folder = RunFolder(Path(run.folder))
    _check(run)
    claim = folder.claim()
    if claim is None:
        raise UsageError(f"{run.run}: another process is in charge of it")
    parent = os.fsencode(folder.path.parent)
    with (
        contextlib.closing(claim),
        storing(folder.path),
        closing_fd(Trust().open_folder(parent)[0]) as runs,
    ):
        # A run that is removed only in part must not look like one. Links in it are removed, not
        # followed.
        hidden = f"{REMOVED}{folder.name}"
        _remove_tree(hidden, runs, ignore_errors=True)
        os.rename(folder.name, hidden, src_dir_fd=runs, dst_dir_fd=runs)
        _remove_tree(hidden, runs)


def _remove_tree(name: str, runs: int, *, ignore_errors: bool = False) -> None:
    """Remove a folder in the open folder ``runs``. Raises OSError."""
    if sys.version_info >= (3, 11):
        shutil.rmtree(name, ignore_errors, dir_fd=runs)
    else:
        shutil.rmtree(f"/proc/self/fd/{runs}/{name}", ignore_errors)


def _check(run: RunStatus) -> None:
    """Raises UsageError if the run may still have processes, or is not in a folder of the user."""
    folder = Path(run.folder)
    if folder.parent != home() / "runs":
        raise UsageError(f"{run.run}: not a run of this machine")
    with storing(folder):
        found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UsageError(f"{folder}: not a folder of this user")
    if Record.load(folder).leftovers:
        raise UsageError(
            f"{run.run}: some of its hosts may still run its processes",
            hint=f"`dtrain stop {run.run}` ends them",
        )


def _size(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(root, name).lstat().st_size
    return total
