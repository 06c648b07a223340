"""Options of the whole test suite."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Machines and their load differ too much for time limits on examples. All runs have the same
# examples, so that none fails by chance; `--hypothesis-seed` draws others.
settings.register_profile(
    "dtrain",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
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


@pytest.fixture
def golden(update_golden: bool) -> Callable[[str, Path], None]:
    """Compares a text with its reference."""

    def compare(text: str, reference: Path) -> None:
        if update_golden:
            reference.write_text(text, encoding="utf-8")
        assert reference.exists(), f"{reference} is missing: read the text, then --update-golden"
        assert text == reference.read_text(encoding="utf-8")

    return compare


SIGNALS = ("SIGHUP", "SIGINT", "SIGPIPE", "SIGTERM", "SIGTSTP", "SIGWINCH")
"""Without SIGCHLD, which torch's data loader handles from its first use on."""
REGISTERS = {"CHILDREN", "HELPERS", "STARTING"}
"""What runs now, not constants."""


def shared_state() -> dict[str, object]:
    """What a test can change for all later tests of its process: the product's constants, the
    environment, the working folder, and the handlers of signals."""
    found: dict[str, object] = {"the working folder": os.getcwd()}
    found.update({f"${name}": value for name, value in os.environ.items()})
    found.update({name: signal.getsignal(signal.Signals[name]) for name in SIGNALS})
    for module, content in list(sys.modules.items()):
        if module.partition(".")[0] in ("dtrain", "dtrain_cli"):
            for name, value in vars(content).items():
                constant = name.isupper() and isinstance(value, dict | list | set)
                if constant and name not in REGISTERS:
                    found[f"{module}.{name}"] = repr(value)
    return found


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_changed() -> Iterator[None]:
    """Fail at the end of a file whose tests leave something changed, whatever tests follow it."""
    before = shared_state()
    yield
    after = shared_state()
    changed = [name for name in before if before[name] != after.get(name)]
    changed += [name for name in after.keys() - before.keys() if name.startswith("$DTRAIN")]
    ignored = "$PYTEST_CURRENT_TEST"
    left = {name: (before.get(name), after.get(name)) for name in changed if name != ignored}
    assert not left, f"changed for the tests of other files: {left}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the thousands of collected tests out of garbage collection, which would look at them
    again and again: all of them live until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slow files first. At the end, all workers then have short ones left to share. Files
    that mostly wait for hosts, the stages first, alternate with files that mostly compute."""
    marks: dict[Path, set[str]] = {}
    for item in items:
        marks.setdefault(item.path, set()).update(mark.name for mark in item.iter_markers())
    stages = {"programs", "slurm", "kubernetes", "containers"}
    waiting = [path for path, names in marks.items() if names & stages]
    waiting += [path for path, names in marks.items() if names & {"netns"} and path not in waiting]
    computing = [path for path, names in marks.items() if names & {"tensorflow", "torch", "slow"}]
    computing = [path for path in computing if path not in waiting]
    place = {
        path: (number + 0.5) / len(files)
        for files in (waiting, computing)
        for number, path in enumerate(files)
    }
    items.sort(key=lambda item: place.get(item.path, 1.0))
