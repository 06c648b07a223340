"""`dtrain plan` is fast and imports only what it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


SEARCH = """
import cProfile, pstats, sys
from dtrain.parallelism.answer.alternatives import faster_backend
from dtrain.planning.request import PlanRequest
from dtrain.planning.question import pose
profile = cProfile.Profile()
gpus, seq_len = map(int, sys.argv[4:])
model = {sys.argv[1]: sys.argv[2], "gpu": sys.argv[3], "gpus": gpus, "seq_len": seq_len}
profile.runcall(lambda: faster_backend(pose(PlanRequest(**model)).answer()))
print(pstats.Stats(profile).total_calls)
"""


@pytest.mark.parametrize(
    ("question", "calls"),
    [
        ("model_size 100B a100-80gb 64 4096", 800_000),
        ("model_size 100B a100-80gb 16384 4096", 350_000),
        ("model qwen3-235b-a22b h100-80gb 256 131072", 6_500_000),
    ],
)
def test_the_search_of_all_backends_is_fast(question: str, calls: int) -> None:
    """Counts calls, because times depend on the machine. A million calls take about 0.5 s."""
    command = [sys.executable, "-c", SEARCH, *question.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < calls


def test_json_without_a_file_imports_only_what_it_needs() -> None:
    code = (
        "import sys; from dtrain_cli import app\n"
        "sys.argv = ['dtrain', 'plan', '--model-size', '7B', '--json']\n"
        "app.run()\n"
        "print(sorted({'yaml', 'rich', 'paramiko', 'torch', 'dtrain.spec'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("}\n[]\n"), done.stdout[-300:]
