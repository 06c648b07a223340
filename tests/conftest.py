"""Options of the whole test suite."""

import signal

import pytest
from hypothesis import HealthCheck, settings

# Machines and their load differ too much for time limits on examples.
settings.register_profile("dtrain", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dtrain")

# What some tests send would be ignored by all that they start: a hangup under nohup, an interrupt
# in the background of a script.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write what golden tests find as their new references, to be read in the diff",
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slow files first. At the end, all workers then have short ones left to share."""
    slow = {"netns", "tensorflow", "torch"}
    files = {item.path for item in items if slow & {mark.name for mark in item.iter_markers()}}
    items.sort(key=lambda item: item.path not in files)
