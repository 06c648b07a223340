"""Thousands of damaged run folders and cluster files, with fixed seeds."""

from __future__ import annotations

import pytest

from fuzz import feed
from fuzz.stored import TARGETS, Target

COUNT = {"record": 1000, "journal": 1200, "cluster file": 2000}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target[0]))
def test_damage_is_a_user_error(target: Target) -> None:
    feed(target, COUNT[target[0]])
