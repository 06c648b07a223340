"""Calls that connect to all hosts raise the limit of open files before."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dtrain
from support.launching import Scene


@pytest.fixture
def _few_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("_few_files")
@pytest.mark.parametrize(
    "call", [dtrain.launch, dtrain.check, lambda file: dtrain.execute(file, ["true"])]
)
def test_each_host_may_have_open_files(scene: Scene, call: Callable[[Path], object]) -> None:
    call(scene.cluster_file(scene.script(""), hosts=2, slots=1))
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 2 * 4 + 256
