"""The job that this process is part of, as its environment describes it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

from dtrain.runtime.layout import Layout, Training


@dataclass(frozen=True)
class Job:
    """What the cluster file said, and what holds for a script that was started without dtrain."""

    strategy: str | None
    """The name in ``job.strategy``; ``None`` where nothing names one."""
    layout: Layout | None
    training: Training
    launched: bool
    """Whether dtrain started this process."""


def current_job(environment: Mapping[str, str] = os.environ) -> Job:
    """The job of this process.

    Raises ValueError for a ``DTRAIN_LAYOUT`` or ``DTRAIN_TRAINING`` that is not what a launch
    writes.
    """
    return Job(
        strategy=environment.get("DTRAIN_STRATEGY"),
        layout=_read("DTRAIN_LAYOUT", Layout, environment),
        training=_read("DTRAIN_TRAINING", Training, environment) or Training(),
        launched="DTRAIN_RUN_ID" in environment,
    )


_T = TypeVar("_T", Layout, Training)


def _read(variable: str, kind: type[_T], environment: Mapping[str, str]) -> _T | None:
    text = environment.get(variable)
    if not text:
        return None
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{variable} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{variable} must be a JSON object, not {text}")
    known = {field.name for field in fields(kind)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"{variable} has unknown keys: {', '.join(unknown)}")
    return kind(**values)
