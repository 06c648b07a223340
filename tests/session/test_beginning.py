"""What a launch finds out before it connects to a host."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.diagnostics import StoppedError, UsageError
from dtrain.runs.request import Request
from dtrain.runs.storage import StorageError
from dtrain.session.beginning import files_to_send, new_run
from dtrain.session.caller import Caller
from dtrain.session.stopping.control import Control

FILE = """
cluster: {{hosts: [n1], gpus: 0}}
job: {{framework: none, {program}, sync: {{source: src, exclude: [old]}}}}
"""


def request(folder: Path, program: str) -> Request:
    source = folder / "src"
    (source / "old").mkdir(parents=True)
    (source / "sub").mkdir()
    (source / "linked").symlink_to("sub")
    for name in ("train.py", "old/train.py", "sub/train.py"):
        (source / name).write_text("print(1)")
    return Request(str(folder / "c.yaml"), str(folder), FILE.format(program=program))


@pytest.mark.parametrize(
    "script", ["nope.py", "old/train.py", "sub", "sub/nope.py", "./a/../b.py", "../c.yaml"]
)
def test_a_script_that_is_not_sent(tmp_path: Path, script: str) -> None:
    asked = request(tmp_path, f"script: {script}")
    with pytest.raises(UsageError, match=f"has no {script} that would be sent") as caught:
        files_to_send(asked, asked.spec(), Control())
    assert caught.value.message.startswith(f"{tmp_path / 'c.yaml'}:3:24: job.script: ")
    unchecked = replace(asked, check=False)
    assert files_to_send(unchecked, unchecked.spec(), Control()) is not None


def test_a_misspelled_script(tmp_path: Path) -> None:
    asked = request(tmp_path, "script: ./sub/tain.py")
    with pytest.raises(UsageError) as caught:
        files_to_send(asked, asked.spec(), Control())
    assert caught.value.hint.startswith("did you mean 'sub/train.py'? ")


@pytest.mark.parametrize(
    "program",
    [
        "script: train.py",
        "script: ./sub/../train.py",
        "script: linked/train.py",
        "script: /opt/train.py",
        "module: train",
    ],
)
def test_other_programs_need_not_be_sent(tmp_path: Path, program: str) -> None:
    asked = request(tmp_path, program)
    assert files_to_send(asked, asked.spec(), Control()) is not None


def test_a_launch_that_is_stopped_reads_no_more(tmp_path: Path) -> None:
    asked, control = request(tmp_path, "script: train.py"), Control()
    control.stop()
    with pytest.raises(StoppedError):
        files_to_send(asked, asked.spec(), control)


def test_a_run_that_cannot_be_recorded_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    asked = request(tmp_path, "script: train.py")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # as on a full disk
    try:
        with pytest.raises(StorageError), new_run(asked, Caller(), None):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [*(tmp_path / "home" / "runs").iterdir()]
