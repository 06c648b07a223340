"""Thousands of hostile inputs from hosts, with fixed seeds, cause no internal error."""

from __future__ import annotations

import time
from random import Random

import pytest

from fuzz import COST, FIXED_COST, agent, facts, sync
from fuzz.mutation import Target

SEED = 20_250_101
COUNT = {"relay": 3500, "inquiry": 150, "launch": 150, "attach": 200}
COUNT |= {"facts": 2800, "preflight": 200, "sync": 3000}
"""10,000 in all."""


@pytest.mark.parametrize(
    "target", agent.TARGETS + facts.TARGETS + sync.TARGETS, ids=lambda target: str(target[0])
)
def test_hostile_host(target: Target) -> None:
    name, generate, read = target
    random = Random(SEED)
    for _ in range(COUNT[name]):
        data = generate(random)
        begun = time.process_time()
        try:
            read(data)
        except Exception as error:
            raise AssertionError(f"{name}: {data[:2000]!r}") from error
        assert time.process_time() - begun < FIXED_COST + COST * len(data), data[:2000]
