"""Thousands of hostile inputs from hosts, with fixed seeds, cause no internal error."""

from __future__ import annotations

import pytest

from fuzz import agent, facts, feed, sync
from fuzz.mutation import Target

COUNT = {"relay": 3500, "inquiry": 150, "launch": 150, "attach": 200}
COUNT |= {"facts": 2800, "preflight": 200, "sync": 3000}
"""10,000 in all."""


@pytest.mark.parametrize(
    "target", agent.TARGETS + facts.TARGETS + sync.TARGETS, ids=lambda target: str(target[0])
)
def test_hostile_host(target: Target) -> None:
    feed(target, COUNT[target[0]])
