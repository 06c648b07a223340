"""A log that could not be read to its end is reported as such."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain.engines.kubernetes.client import NotFoundError
from dtrain.engines.kubernetes.lines import Cursor
from dtrain.engines.kubernetes.reading import LogEnded, Readers
from support.limits import HANG

Answer = Callable[[], Generator[list[bytes]]]
LINE = b"2026-11-22T10:00:00.5Z [worker-0] hello\n"


def one_line() -> Generator[list[bytes]]:
    yield [LINE]


def gone() -> Generator[list[bytes]]:
    raise NotFoundError("server", "GET log", "no such pod")
    yield []


@pytest.mark.parametrize(
    ("answers", "whole"),
    [
        ([one_line], True),
        ([gone], False),
        ([one_line, gone], True),
    ],
)
def test_the_end_of_a_log(answers: list[Answer], whole: bool) -> None:
    left = list(answers)
    client: Any = SimpleNamespace(stream=lambda path, **query: left.pop(0)())
    launched: Any = SimpleNamespace(path="", selector="", name="job")
    readers = Readers(client, launched)
    over = threading.Event()
    if len(answers) == 1:
        over.set()
    pod: Any = SimpleNamespace(name="pod", uid="uid")
    readers.read_log(pod, Cursor(), over)
    events = [readers.events.get(timeout=HANG)]
    over.set()
    while not isinstance(events[-1], LogEnded):
        events.append(readers.events.get(timeout=HANG))
    assert events[-1] == LogEnded("uid", whole)
    assert len(events) == 1 + (one_line in answers)
