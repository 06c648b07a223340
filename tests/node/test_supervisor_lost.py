"""A relay whose supervisor has died answers the launcher while it ends the processes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from dtrain.node.agent import relay
from dtrain.node.agent.run_state import RunState
from dtrain.node.agent.sweep import Tag
from dtrain.node.importer import Importer
from dtrain.node.trust import Trust


def test_pings_are_answered_during_a_long_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = relay.Relay(io.BytesIO(), Importer({}, dict))

    class Sweep:
        """A host where processes withstand KILL for three steps."""

        survivors: tuple[()] = ()

        def __init__(self, *_: object) -> None:
            self._steps = 3

        def step(self) -> float | None:
            one._supervisor.pulse.note(b'{"op":"ping"}')
            self._steps -= 1
            return 0.0 if self._steps else None

    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(relay, "Sweep", Sweep)
    monkeypatch.setattr(one._channel, "send", sent.append)
    # It reaps all children of this process.
    monkeypatch.setattr(one._supervisor, "await_end", lambda: "killed by SIGKILL")
    folder = bytes(tmp_path)
    one._report_lost(RunState(folder, Trust(None)), Tag("run", "host", folder), ended=False)
    assert [message["type"] for message in sent] == ["alive", "alive", "lost"]
    # The supervisor is known to be dead, not silent.
    assert [message["silent"] for message in sent[:2]] == [0.0, 0.0]
