"""Commands for runs that another process is in charge of."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from dtrain.diagnostics import UsageError
from dtrain.engines import existing
from dtrain.runs.journal import RunStarted, encode
from dtrain.runs.log_store import Holder
from dtrain.session.control import Control
from dtrain.session.observer import NullObserver
from support.stored import make_run


def test_a_process_of_another_machine_gets_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines can share the folder of the runs. A process here may have the same id."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = make_run()
    folder.journal.write_bytes(encode(0.0, RunStarted("run-1", ("n1",))))
    claim = folder.claim()
    assert claim is not None
    observer: Any = NullObserver()
    with subprocess.Popen(["sleep", "600"]) as other:
        (folder.path / "launcher").write_text(f"{other.pid:<20}\nlogin2 boot pid:[1]\n")
        assert folder.holder() == Holder(other.pid, "login2")
        with pytest.raises(UsageError, match=f"process {other.pid} on login2 is in charge"):
            existing.stop(
                folder, force=False, engines=lambda _: 1 / 0, observer=observer, control=Control()
            )
        assert other.poll() is None
        other.kill()
    claim.release()
