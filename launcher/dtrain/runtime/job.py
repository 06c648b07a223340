"""The job of this process, read from its environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

from dtrain.runtime.layout import Layout, Training


@dataclass(frozen=True)
class JobSettings:
    """The settings of the cluster file, or the defaults of a script that dtrain did not start."""

    strategy: str | None
    """The name in ``job.strategy``; ``None`` if it is not set."""
    layout: Layout | None
    training: Training


def current_job(environment: Mapping[str, str] = os.environ) -> JobSettings:
    """The job of this process.

    Raises ValueError if ``DTRAIN_LAYOUT`` or ``DTRAIN_TRAINING`` has a value that no launch
    writes.
    """
    return JobSettings(
        strategy=environment.get("DTRAIN_STRATEGY"),
        layout=_read("DTRAIN_LAYOUT", Layout, environment),
        training=_read("DTRAIN_TRAINING", Training, environment) or Training(),
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
