"""What a failed process wrote about its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.failures.cause import Failure
from dtrain.session.watching import failure_output
from dtrain.session.watching.failure_output import explained

RAISED = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n{}\n'


def test_a_stderr_is_parsed_again_only_if_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of workers may fail, and the first cause is looked for several times."""
    reads: list[Path] = []
    read = failure_output.tail
    monkeypatch.setattr(failure_output, "tail", lambda *of: reads.append(of[0]) or read(*of))
    stderr = tmp_path / "a" / "worker-0.err"
    stderr.parent.mkdir()
    failure = Failure("a", "worker", 0, None, time=1.0, code=1)
    for number, error in enumerate(("ValueError: one", "ValueError: two"), 1):
        with stderr.open("a") as file:
            file.write(RAISED.format(error))
        assert explained(failure, tmp_path).message == error
        assert explained(failure, tmp_path).message == error
        assert reads == [stderr] * number
