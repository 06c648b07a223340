"""A receiver counts only silence of the launcher: a slow network is none."""

from __future__ import annotations

import io
import signal

from dtrain.node.sync.channel import IDLE, Channel
from dtrain.node.sync.wire import FRAME, RAW
from dtrain.sync import Patience


class Slow(io.BufferedReader):
    """Each byte arrives just before the time is up."""

    def read1(self, size: int = -1, /) -> bytes:
        left.append(signal.alarm(2))
        return super().read1(1)


left: list[int] = []
"""Seconds to the time limit when the receiver begins to wait."""


def test_the_limit_begins_again_with_each_piece() -> None:
    frame = FRAME.pack(RAW, 5) + b"bytes"
    channel = Channel(Slow(io.BytesIO(frame)), io.BytesIO())  # type: ignore[arg-type]
    assert channel.content() == b"bytes"
    assert left == [IDLE] * len(frame)
    assert signal.alarm(0) == 0


def test_a_lock_is_free_before_the_next_launch_gives_up() -> None:
    assert Patience().lock > IDLE
