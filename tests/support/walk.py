"""Walks a pure state machine through every state that it can reach."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

State = TypeVar("State")
Event = TypeVar("Event")
Action = TypeVar("Action")


def transitions(
    starts: Iterable[State],
    events: Sequence[Event],
    step: Callable[[State, Event], tuple[State, list[Action]]],
) -> list[tuple[State, Event, State, list[Action]]]:
    """Every transition out of every state that ``events`` in any order lead to."""
    found = []
    seen: set[str] = set()
    ahead = deque(starts)
    while ahead:
        state = ahead.popleft()
        known = repr(state)
        if known in seen:
            continue
        seen.add(known)
        for event in events:
            after, actions = step(state, event)
            found.append((state, event, after, actions))
            ahead.append(after)
    return found
