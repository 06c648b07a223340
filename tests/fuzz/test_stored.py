"""Damaged run folders and cluster files, by the thousand and always the same ones."""

from __future__ import annotations

from random import Random

import pytest

from fuzz.stored import TARGETS, Target

COUNT = {"record": 1000, "journal": 1000, "cluster file": 300}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target[0]))
def test_damage_is_an_error_and_no_fault(target: Target) -> None:
    name, generate, read = target
    random = Random(20_250_101)
    for _ in range(COUNT[name]):
        data = generate(random)
        try:
            read(data)
        except Exception as error:
            raise AssertionError(f"{name}: {data[:2000]!r}") from error
