"""Completion: a real bash with a real Tab, and what each shell asks for."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from dtrain.diagnostics import ExitCode
from dtrain.failures.cause import Report
from dtrain.runs.events import Finished
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import Journal
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from support.launching import completed
from support.limits import HANG

DTRAIN = Path(sys.executable).with_name("dtrain")
CLUSTER = {
    "cluster": {"hosts": ["gpu[01-02]"], "gpus": 2},
    "job": {"framework": "torch", "script": "train.py"},
}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with cluster files, other files, a run that is over and one that is not."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "big.yml").write_text(yaml.safe_dump(CLUSTER))
    (tmp_path / "x\\$(touch pwned).yaml").write_text(yaml.safe_dump(CLUSTER))
    (tmp_path / "compose.yaml").write_text("services: {}\n")
    request = Request.of(tmp_path / "cluster.yaml")
    for number, run in enumerate(("over-1", "open-2")):
        folder = RunFolder.create(run)
        Record(run, request, 29500, sys.executable, 1e9 + number).save(folder.path)
    report = Report(ExitCode.OK, "done")
    Journal(RunFolder.find("over-1").journal).write(1e9, Finished(report))
    return tmp_path


def asked(desk: Path, *words: str, of: str = "bash") -> list[str]:
    """What a shell is offered for the last of ``words``."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "DTRAIN_HOME": str(desk / "home"),
        "_DTRAIN_COMPLETE": f"complete_{of}",
        "COMP_WORDS": "\n".join(("dtrain", *words)),
        "COMP_CWORD": str(len(words)),
        "_TYPER_COMPLETE_ARGS": " ".join(("dtrain", *words)),
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = completed(environment=environment, folder=desk)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["la"], ["launch"]),
        (["launch", "--tensorb"], ["--tensorboard", "--tensorboard-dir"]),
        (["launch", ""], ["cluster.yaml", "configs/big.yml"]),
        (["launch", "configs/"], ["configs/big.yml"]),
        (["launch", "cluster.yaml", "--host", ""], ["gpu01", "gpu02"]),
        (["launch", "cluster.yaml", "--host", "gpu01,"], ["gpu01,gpu02"]),
        (["launch", "--rank", "0,", "cluster.yaml", "--rank", "0,"], ["0,1", "0,2", "0,3"]),
        (["launch", "--set", "job.restart.m"], ["job.restart.max=", "job.restart.max=3"]),
        (
            ["launch", "cluster.yaml", "--set", "cluster.hosts=[a,b]", "--host", ""],
            ["a", "b"],
        ),
        (["logs", ""], ["open-2", "over-1"]),
        (["logs", "over-1", "--rank", "3"], ["3"]),
        (["stop", ""], ["open-2"]),
        (["plan", "--gpu", "mi300"], ["mi300a", "mi300x"]),
        (["plan", "--model", "llama-3-7"], ["llama-3-70b"]),
        (["plan", "--recompute", "s"], ["selective"]),
        (["help", "sec"], ["security"]),
        (["help", "job.watchdog.s"], ["job.watchdog.silence"]),
        # What cannot be read offers nothing, and says nothing on the line that the user types.
        (["launch", "compose.yaml", "--host", ""], []),
        (["logs", "no-such-run", "--rank", ""], []),
    ],
)
def test_values(desk: Path, words: list[str], offered: list[str]) -> None:
    assert sorted(asked(desk, *words)) == offered


def test_zsh_and_fish_also_show_what_a_value_means(desk: Path) -> None:
    (line,) = asked(desk, "stop", of="fish")
    assert line == "stop\tStop runs on all their hosts."
    assert '"stop":"Stop runs on all their hosts."' in asked(desk, "stop", of="zsh")[0]


def test_verbs_load_nothing_heavy() -> None:
    code = (
        "import sys; from dtrain_cli import app\n"
        "status = app.run()\n"
        "heavy = {'rich', 'yaml', 'paramiko', 'dtrain.spec', 'dtrain.runs'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    for shell in ("bash", "zsh", "fish"):
        environment = {
            "_DTRAIN_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": "dtrain\nl",
            "COMP_CWORD": "1",
            "_TYPER_COMPLETE_ARGS": "dtrain l",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.argv = ['dtrain']\n{code}"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "launch" in done.stdout, done.stderr
        assert done.stdout.endswith("[]\n"), done.stdout


def test_tab_in_a_real_bash(desk: Path) -> None:
    """From the script that dtrain prints to the line on the terminal."""
    (desk / "bashrc").write_text("PS1='$ '\nsource <(_DTRAIN_COMPLETE=source_bash dtrain)\n")
    bash, terminal = pty.openpty()
    process = subprocess.Popen(
        ["bash", "--noprofile", "--rcfile", "bashrc", "-i"],
        cwd=desk,
        env={"PATH": f"{DTRAIN.parent}:/usr/bin:/bin", "TERM": "dumb", "HOME": str(desk)},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    shown = b""

    def until(text: bytes) -> None:
        nonlocal shown
        deadline = time.monotonic() + HANG
        while text not in shown:
            assert select.select([bash], [], [], deadline - time.monotonic())[0], shown
            shown += os.read(bash, 4096)

    try:
        until(b"$ ")
        os.write(bash, b"dtrain lau\t")
        until(b"dtrain launch ")
        os.write(bash, b"clu\t")
        until(b"cluster.yaml ")
        os.write(bash, b"--host gpu02\t")
        until(b"--host gpu02 ")
    finally:
        process.kill()
        process.wait()
        os.close(bash)
