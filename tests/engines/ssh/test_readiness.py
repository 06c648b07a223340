"""Whether a host that has restarted can run the job again, on this machine as the host."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

import pytest

from dtrain.engines.ssh import readiness
from dtrain.engines.ssh.readiness import NotReadyError, check_ready
from dtrain.launchplan.build import build
from dtrain.launchplan.plan import LaunchPlan
from dtrain.spec.load import parse
from dtrain.transport.local import LocalTransport
from support.limits import until


def plan_of(
    workdir: object,
    *,
    python: object = sys.executable,
    run_dir: object = "~/.dtrain",
    job: str = "",
) -> LaunchPlan:
    cluster = f"{{hosts: [first], gpus: 1, python: {python}, run_dir: {run_dir}}}"
    job = f"{{framework: none, script: train.py, workdir: {json.dumps(str(workdir))}{job}}}"
    return build(parse(f"cluster: {cluster}\njob: {job}\n", "cluster.yaml"), run="run")


def check(plan: LaunchPlan) -> None:
    (part,) = plan.hosts
    with closing(LocalTransport().connect(part.host)) as connection:
        check_ready(connection, plan, part, Path("/nowhere"))


def test_a_host_with_all_folders_is_ready(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s "mine"\\'
    folder.mkdir()
    check(plan_of(folder))


def test_the_job_needs_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    absent = tmp_path / "absent"
    with pytest.raises(NotReadyError, match="ready: ~: no such folder"):
        check(plan_of(tmp_path))
    check(plan_of(tmp_path, run_dir=tmp_path))
    with pytest.raises(NotReadyError, match=f"{absent}: no such folder"):
        check(plan_of(absent, run_dir=tmp_path))


def test_each_start_sends_what_job_sync_names(tmp_path: Path) -> None:
    check(plan_of(tmp_path / "absent", job=", sync: {}"))


def test_the_job_needs_its_python(tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match="there is no /conda/bin/python") as caught:
        check(plan_of(tmp_path, python="/conda/bin/python"))
    assert "cluster.python" in caught.value.hint


def test_a_folder_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "SECONDS", 0.1)
    blocking = tmp_path / "python"
    blocking.write_text("#!/bin/sh\nexec sleep 60\n")
    blocking.chmod(0o755)
    with pytest.raises(NotReadyError, match="python is still running") as caught:
        check(plan_of(tmp_path, python=blocking))
    assert "file server" in caught.value.hint


BLOCKED = """#!{python}
import os, sys, time
open({pid!r}, "w").write(str(os.getpid()))
os.path.isdir = lambda folder: time.sleep(1000)
program = sys.argv[3]
sys.argv = ["-c", *sys.argv[4:]]
exec(program)
"""


def test_a_program_that_a_file_server_blocks_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "SECONDS", 0.5)
    blocked, pid = tmp_path / "python", tmp_path / "pid"
    blocked.write_text(BLOCKED.format(python=sys.executable, pid=str(pid)))
    blocked.chmod(0o755)
    with pytest.raises(NotReadyError, match="python is still running"):
        check(plan_of(tmp_path, python=blocked))
    number = until(lambda: pid.exists() and pid.read_text(), "its start")
    until(lambda: not Path("/proc", number).exists(), "the end of the program")
