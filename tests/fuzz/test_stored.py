"""Thousands of damaged run folders and cluster files, with fixed seeds."""

from __future__ import annotations

import time
from random import Random

import pytest

from fuzz.stored import TARGETS, Target

COUNT = {"record": 1000, "journal": 1200, "cluster file": 2000}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target[0]))
def test_damage_is_a_user_error(target: Target) -> None:
    name, generate, read = target
    random = Random(20_250_101)
    for _ in range(COUNT[name]):
        data = generate(random)
        begun = time.process_time()
        try:
            read(data)
        except Exception as error:
            raise AssertionError(f"{name}: {data[:2000]!r}") from error
        # Linear in the size of the input, plus a constant.
        assert time.process_time() - begun < 2.0 + 2e-5 * len(data), f"{name}: {data[:2000]!r}"
