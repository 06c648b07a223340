"""Stop requests in a file, to a program that handles no signals."""

from __future__ import annotations

import os
from pathlib import Path

from dtrain.runs.folder import RunFolder
from dtrain.session.stopping.control import Control, Force
from dtrain.session.stopping.stop_requests import listening, send
from support.limits import until


class Noting(Control):
    requests = 0

    def stop(self, why: str = "stopped", *, once: bool = False) -> None:
        super().stop(why, once=once)
        self.requests += 1


def test_two_programs_that_stop_a_launch_do_not_kill_it(tmp_path: Path) -> None:
    folder, control = RunFolder(tmp_path), Noting()
    with listening(folder, control):
        for _ in range(2):
            assert send(folder, os.getpid(), force=False)
        until(lambda: control.requests == 2)
    assert control.force is Force.TERM
