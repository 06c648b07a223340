"""`dtrain plan` is fast and imports only what it needs."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import pytest

from dtrain.parallelism.answer.backends import gain
from dtrain.parallelism.question import Question
from dtrain.parallelism.search import Plan
from dtrain.plan_request import PlanRequest
from dtrain.planning import pose

pytestmark = pytest.mark.slow


def _cpu() -> float:
    """Seconds of CPU time of this process's children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(("gpus", "bound"), [("64", 0.5), ("16384", 3.0)])
def test_the_whole_search_is_fast(gpus: str, bound: float) -> None:
    command = [sys.executable, "-m", "dtrain_cli", "plan", "--model-size", "100B", "--json"]

    def once() -> float:
        start = _cpu()
        subprocess.run([*command, "--gpus", gpus], stdout=subprocess.DEVNULL, check=True)
        return _cpu() - start

    # CPU time, because the machine may be busy. A limit of four times the goal still finds a search
    # that became slow.
    assert any(bound / 10 < once() < 4 * bound for _ in range(3))


def test_the_line_on_other_backends_adds_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts layouts, because times depend on the load of the machine."""
    searched: list[int] = []

    def counted(self: Question, **fixed: Any) -> Plan:
        plan = search(self, **fixed)
        searched.append(plan.considered)
        return plan

    search = Question.search
    monkeypatch.setattr(Question, "search", counted)
    answer = pose(PlanRequest(model_size="100B")).answer()
    assert gain(answer)
    first, *others = searched
    assert sum(others) < 0.3 * first


def test_json_without_a_file_imports_only_what_it_needs() -> None:
    code = (
        "import sys; from dtrain_cli import app\n"
        "sys.argv = ['dtrain', 'plan', '--model-size', '7B', '--json']\n"
        "app.run()\n"
        "print(sorted({'yaml', 'rich', 'paramiko', 'torch', 'dtrain.spec', 'dtrain_cli.views'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("}\n[]\n"), done.stdout[-300:]
