"""Errors that end a job before its first step, and their messages."""

import signal

import pytest

from runtime.tensorflow.conftest import CHECKS

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize(
    ("strategy", "roles", "first", "absent"),
    [
        ("multi_worker_mirrored", {"worker": 2}, "worker-0", "worker 1"),
        ("parameter_server", {"chief": 1, "worker": 1, "ps": 1}, "chief-0", "worker 0"),
    ],
)
def test_a_wait_for_missing_peers_ends_and_names_them(
    start, strategy: str, roles: dict[str, int], first: str, absent: str
) -> None:
    environment = {"DTRAIN_START_TIMEOUT": "2"}
    tasks = start(strategy, [CHECKS / "absent.py", first.partition("-")[0]], environment, **roles)
    assert tasks[first].wait() == -signal.SIGHUP
    assert f"no answer from {absent} at 127.0.0.1:" in tasks[first].output
    assert "DTRAIN_START_TIMEOUT" in tasks[first].output


def test_refusals(start) -> None:
    assert "all refused" in start("none", [CHECKS / "refusals.py"])["-0"].succeeds()
