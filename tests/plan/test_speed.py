"""`dtrain plan` is fast and imports only what it needs."""

from __future__ import annotations

import cProfile
import pstats
import subprocess
import sys

import pytest

from dtrain.parallelism.answer.backends import gain
from dtrain.plan_request import PlanRequest
from dtrain.planning import pose

pytestmark = pytest.mark.slow


SEARCH = """
import cProfile, pstats, sys
from dtrain.plan_request import PlanRequest
from dtrain.planning import pose
profile = cProfile.Profile()
profile.runcall(lambda: pose(PlanRequest(model_size="100B", gpus=int(sys.argv[1]))).answer())
print(pstats.Stats(profile).total_calls)
"""


@pytest.mark.parametrize(("gpus", "calls"), [("64", 800_000), ("16384", 300_000)])
def test_the_whole_search_is_fast(gpus: str, calls: int) -> None:
    """Counts calls, because times depend on the machine. A million calls take about 0.5 s."""
    command = [sys.executable, "-c", SEARCH, gpus]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < calls


def test_the_line_on_other_backends_adds_little() -> None:
    answer = pose(PlanRequest(model_size="100B")).answer()
    profile = cProfile.Profile()
    assert profile.runcall(gain, answer)
    # It searches all layouts of two backends.
    assert pstats.Stats(profile).total_calls < 800_000


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
