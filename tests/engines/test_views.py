"""The views look the same for every engine: they do not know which one runs."""

from __future__ import annotations

import re
from pathlib import Path

VIEWS = Path(__file__).parents[2] / "cli" / "dtrain_cli" / "views"
WORDS = re.compile(r"kube|jobset|trainjob|\bpods?\b|kueue|slurm|sbatch|paramiko", re.IGNORECASE)


def test_views_have_no_word_of_an_engine() -> None:
    texts = [path for path in VIEWS.rglob("*") if path.suffix in (".py", ".html", ".css", ".js")]
    assert len(texts) > 5
    found = {str(path): match[0] for path in texts if (match := WORDS.search(path.read_text()))}
    assert found == {}
