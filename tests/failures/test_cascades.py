"""Who is blamed when all ranks fail together, from what ranks of real runs said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dtrain.failures.cause import Failure, in_order_of_blame

FILES = sorted((Path(__file__).parent / "cascades").glob("*.yaml"))
CASCADES: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in FILES
}
KNOWN = {
    "killed": "killed",
    "killed-with-the-store": "killed",
    "raised": None,
    "exited": None,
    "crashed": "segmentation-fault",
    "out-of-memory": "cpu-out-of-memory",
    "bad-data": None,
    "data-worker-killed": "shared-memory-full",
    "other-model": "ddp-different-models",
    "missing-module": "module-missing",
    "died-before-joining": None,
    "port-taken": "address-in-use",
    "tensorflow-killed": "killed",
    "tensorflow-killed-first": "killed",
    "tensorflow-raised": None,
    "tensorflow-out-of-memory": "tensorflow-out-of-memory",
}
"""What explains the first cause; None where only its own words can."""


def failures(name: str, shift: dict[int, float] | None = None) -> list[Failure]:
    """Each rank on a host of its own; those that ended well have not failed."""
    return [
        Failure(
            host=f"n{rank['rank']}",
            role="worker",
            index=rank["rank"],
            rank=rank["rank"],
            time=rank["time"] + (shift or {}).get(rank["rank"], 0.0),
            code=rank["code"],
            signal=rank["signal"],
            message=rank["said"].splitlines()[-1] if rank["said"] else "",
            traceback=rank["said"],
        )
        for rank in CASCADES[name]["ranks"]
        if rank["code"] != 0
    ]


def test_all_recordings_are_expected() -> None:
    assert set(CASCADES) == set(KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_the_first_cause_comes_first_and_is_explained(name: str) -> None:
    first, *others = in_order_of_blame(failures(name))
    assert first.rank == CASCADES[name]["first"]
    known = first.explanation
    assert (known.id if known is not None else None) == KNOWN[name]
    for other in others:
        assert other.explanation is not None, other.traceback
        assert other.explanation.echo, other.traceback


@pytest.mark.parametrize("name", KNOWN)
def test_it_does_even_if_its_end_was_heard_of_last(name: str) -> None:
    """As where Python takes seconds to end, or a core is dumped."""
    late = {CASCADES[name]["first"]: 100.0}
    assert in_order_of_blame(failures(name, late))[0].rank == CASCADES[name]["first"]
