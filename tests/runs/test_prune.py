"""`dtrain ps --prune` removes what is over, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.diagnostics import ExitCode, UsageError
from dtrain.failures.cause import Report
from dtrain.runs import events, journal, prune
from dtrain.runs.folder import RunFolder
from dtrain.runs.record import Record
from dtrain.runs.status import RunStatus, status, statuses
from support import warm
from support.limits import HANG
from support.stored import REQUEST

DAY = 86400.0


def make(name: str, days_ago: float, *, over: bool = True) -> RunFolder:
    folder = RunFolder.create(name)
    started = time.time() - days_ago * DAY
    Record(name, REQUEST, 29500, "python3", started).save(folder.path)
    written: list[events.JournalEvent] = [events.RunStarted(("n1", "n2", "n3"))]
    if over:
        written.append(events.Finished(Report(ExitCode.OK, "done", seconds=60.0)))
    folder.journal.write_bytes(b"".join(journal.encode(started, one) for one in written))
    folder.journal.chmod(0o600)
    (folder.logs / "n1").mkdir()
    (folder.logs / "n1" / "worker-0.out").write_bytes(b"x" * 1000)
    return folder


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))


def ps(tmp_path: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    process = warm.dtrain(
        "ps",
        *argv,
        environment={"PATH": "/usr/bin:/bin", "DTRAIN_HOME": os.environ["DTRAIN_HOME"]},
        folder=tmp_path,
        stderr=subprocess.PIPE,
    )
    stdout, stderr = process.communicate(timeout=HANG)
    return subprocess.CompletedProcess(argv, process.wait(), stdout, stderr)


def left() -> set[str]:
    return {folder.name for folder in RunFolder.all()}


@pytest.mark.parametrize(
    ("older_than", "keep", "removed"),
    [
        (None, None, {"d40", "d35"}),
        (5 * DAY, None, {"d40", "d35", "d10"}),
        (None, 1, {"d40", "d35", "d10"}),
        (None, 4, set()),
        (None, 5, set()),
        (None, 9, set()),
        (38 * DAY, 1, {"d40"}),
    ],
)
def test_age_and_number_choose(
    older_than: float | None, keep: int | None, removed: set[str]
) -> None:
    now = 1e9
    report = Report(ExitCode.OK, "done", seconds=60.0)
    runs = [
        RunStatus(f"d{days}", "/x", now - days * DAY, report=report) for days in (40, 10, 35, 1)
    ]
    runs += [
        RunStatus("runs", "/x", now - 99 * DAY, in_charge=7),
        RunStatus("unattended", "/x", now - 99 * DAY),
        RunStatus("damaged", "/x", now - 99 * DAY, unreadable="not JSON"),
    ]
    found = prune.old_runs(runs, now, older_than=older_than, keep=keep)
    assert {run.run for run in found} == removed


def test_it_lists_asks_and_removes(tmp_path: Path) -> None:
    make("old", 40)
    make("new", 1)
    listed = ps(tmp_path, "--prune")
    assert re.search(r"old +done +40 d 0 h ago +[\d.]+ kB\n\n1 run, ", listed.stdout)
    assert "nothing is removed: add --yes" in listed.stdout
    assert left() == {"old", "new"}
    done = ps(tmp_path, "--prune", "--yes")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "removed")
    assert left() == {"new"}
    assert "no run that is over is old enough" in ps(tmp_path, "--prune", "--yes").stdout
    for argv, message in (
        (("--keep", "3"), "for --prune"),
        (("--prune", "--older-than", "30"), "30: not an age"),
        (("--prune", "new"), "takes no run"),
    ):
        wrong = ps(tmp_path, *argv)
        assert wrong.returncode == 2
        assert message in wrong.stderr


def test_what_may_still_run_is_kept() -> None:
    running, unattended = make("running", 40, over=False), make("unattended", 40, over=False)
    left_over, held, damaged = make("left-over", 40), make("held", 40), make("damaged", 40)
    claims = [running.claim(), held.claim()]
    record = Record.load(left_over.path)
    replace(record, leftovers=(("n2", 1),)).save(left_over.path)
    over = [status(left_over), status(held)]
    (damaged.path / "run.json").write_text("{")
    assert prune.sizes(prune.old_runs(statuses(), time.time(), older_than=0, keep=None)) == [
        prune.OldRun(status(held), prune._size(held.path))
    ]
    for run in over:
        with pytest.raises(UsageError, match=r"may still run|in charge"):
            prune.remove(run)
    assert len(left()) == 5
    for claim in claims:
        assert claim is not None
        claim.close()
    assert unattended.path.is_dir()


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    inside = make("inside", 40)
    (inside.logs / "n2").symlink_to(outside)
    other = make("other", 40)
    moved = other.path.rename(tmp_path / "elsewhere")
    other.path.symlink_to(moved)
    found = prune.sizes(prune.old_runs(statuses(), time.time(), older_than=0, keep=None))
    assert [one.run.run for one in found] == ["inside"]
    prune.remove(found[0].run)
    assert (outside / "file").exists()
    assert (moved / "run.json").exists()
    assert [path.name for path in inside.path.parent.iterdir()] == ["other"]
