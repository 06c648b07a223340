"""What requests to stop a launch do, in sequence."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dtrain.session.stopping.control import Control, Force


class Attempt:
    def __init__(self) -> None:
        self.forces: list[Force] = []

    def interrupt(self, why: str, force: Force) -> None:
        self.forces.append(force)

    def detach(self) -> None: ...


def stop(control: Control) -> None:
    control.stop()


def kill(control: Control) -> None:
    control.kill()


def hang_up(control: Control) -> None:
    control.hang_up("its terminal was closed")


@pytest.mark.parametrize(
    ("requests", "forces"),
    [
        ([stop], [Force.TERM]),
        ([stop, hang_up], [Force.TERM]),
        ([hang_up, stop], [Force.TERM]),
        ([kill], [Force.KILL]),
        ([stop, kill], [Force.TERM, Force.KILL]),
        ([hang_up, kill], [Force.TERM, Force.KILL]),
        ([kill, kill], [Force.KILL, Force.GIVE_UP]),
        ([stop, stop, kill], [Force.TERM, Force.KILL, Force.GIVE_UP]),
    ],
)
def test_each_request_raises_the_force(
    requests: list[Callable[[Control], None]], forces: list[Force]
) -> None:
    control, attempt = Control(), Attempt()
    control.hand_to(attempt)
    for request in requests:
        request(control)
    assert attempt.forces == forces
    assert control.force is forces[-1]
