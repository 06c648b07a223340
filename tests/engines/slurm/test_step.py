"""What the machines of a check's step answer, and what they fail to answer."""

from __future__ import annotations

import base64
import json
import subprocess
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain.checks import Severity
from dtrain.checks.judgement import judge
from dtrain.engines.slurm.inspection import _evidence, _in_step, _not_started
from dtrain.engines.slurm.login_shell import CommandAnswer, LoginShell
from dtrain.launchplan.build import build
from dtrain.messages.facts import MAX_ANSWER
from dtrain.spec.load import parse

PLAN = build(
    parse(
        "cluster: {slurm: {cpus: 4}, nodes: 2, gpus: 2}\njob: {framework: none, script: t.py}\n",
        "job.yaml",
    )
)
GRANTED = {"granted": {"count": 2, "devices": ["6", "7"]}}


def answer(number: int, facts: object) -> str:
    text = json.dumps({"facts": facts, "listening": {"port": 1}})
    data = base64.b64encode(zlib.compress(text.encode())).decode()
    lines = [data[at : at + 60] for at in range(0, len(data), 60)]
    return "".join(f"{number} {line}\n" for line in (*lines, "."))


def test_answers_are_put_together() -> None:
    """The lines of several machines are mixed."""
    first, second = answer(0, GRANTED).splitlines(), answer(1, GRANTED).splitlines()
    mixed = "\n".join(line for pair in zip(first, second, strict=True) for line in pair)
    out = f"a login script\n1 @ gpu07\n0 @ gpu03\n{mixed}\n"
    found = _evidence(PLAN, CommandAnswer("srun", 0, out, ""))
    assert [host.name for host in found.hosts] == ["gpu03", "gpu07"]
    assert [host.host.gpus for host in found.hosts] == [(6, 7), (6, 7)]
    assert found.failures == ()


@pytest.mark.parametrize("before", [False, True])
def test_the_folder_of_runs_is_left_as_it_was(tmp_path: Path, before: bool) -> None:
    """A launch shares a new one with the group of the team."""
    runs = tmp_path / "runs"
    if before:
        runs.mkdir()
        (runs / "nodes").mkdir()
    plan = replace(PLAN, run_dir=str(runs))

    class Here(LoginShell):
        def __init__(self) -> None:
            self.host = "here"

        def run(self, command: Any, stdin: bytes = b"", limit: float = 0.0) -> CommandAnswer:
            if command[0] == "sh":
                done = subprocess.run(command, check=False)
                return CommandAnswer("sh", done.returncode, "", "")
            assert len([*runs.glob("check-*")]) == 1
            assert "--cpus-per-task=8" in command
            return CommandAnswer("srun", 1, "", "no machine")

    assert _in_step(plan, Here(), str).hosts == ()
    assert [one.name for one in tmp_path.rglob("*")] == (["runs", "nodes"] if before else [])


@pytest.mark.parametrize(
    ("out", "err", "seen"),
    [
        ("1 @ gpu07\n", "no Python 3.8 or newer\nsrun: error: x\n", "no Python 3.8 or newer"),
        ("1 @ gpu07\n", "srun: error: gpu07: task 1: Killed\n", "gpu07: task 1: Killed"),
        ("1 @ gpu07\n1 !\n", "", "it ended without an answer"),
        ("1 @ gpu07\n1 AAAA\n1 .\n", "", "the host sent a malformed answer"),
        (
            f"1 @ gpu07\n{answer(1, {'machine': ' ' * MAX_ANSWER})}",
            "",
            "the host sent a malformed answer",
        ),
        (f"1 @ gpu07\n{answer(1, {'granted': 3})}", "", "the host sent a malformed answer"),
        ("", "", "it ended without an answer"),
    ],
    ids=["python", "killed", "noise", "no-zlib", "huge", "wrong", "absent"],
)
def test_a_machine_without_an_answer_is_an_error(out: str, err: str, seen: str) -> None:
    text = f"0 @ gpu03\n{answer(0, GRANTED)}{out}"
    (finding,) = judge(_evidence(PLAN, CommandAnswer("srun", 1, text, err)))
    assert finding.subject == "machines"
    assert finding.hosts == (("gpu07",) if out else ("machine 1",))
    assert seen in finding.seen


@pytest.mark.parametrize(
    ("said", "seen", "remedy"),
    [
        (
            "srun: error: Unable to allocate resources: Requested nodes are busy",
            "Slurm did not start the check on 2 machines within 30 s: not checked",
            "sacctmgr show associations user=$USER",
        ),
        (
            "srun: error: x",
            "the step that checks the machines did not start: srun: error: x",
            "hand",
        ),
    ],
)
def test_a_step_that_does_not_start_is_a_warning(said: str, seen: str, remedy: str) -> None:
    finding = _not_started(PLAN, "login", CommandAnswer("srun", 1, "", said))
    assert (finding.severity, finding.seen) == (Severity.WARNING, seen)
    assert remedy in finding.remedy
