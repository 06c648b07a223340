"""Views do not know which engine runs a job."""

from __future__ import annotations

import re
from pathlib import Path

import dtrain_cli.views

FOLDER = Path(dtrain_cli.views.__file__).parent
WORDS = re.compile(
    "slurm|sbatch|squeue|scontrol|scancel|sinfo|srun|kube|jobset|trainjob|\\bpods?\\b",
    re.IGNORECASE,
)


def test_no_view_has_a_word_of_an_engine() -> None:
    files = [path for path in FOLDER.rglob("*") if path.suffix in (".py", ".html", ".js", ".css")]
    assert len(files) > 20
    found = {path.name: WORDS.findall(path.read_text("utf-8")) for path in files}
    assert {name: words for name, words in found.items() if words} == {}
