"""How long a rank computes in a step, although ranks also wait within the passes."""

from __future__ import annotations

import copy
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.failures import stragglers
from dtrain.runtime import steps as module
from dtrain.runtime.torch import timing
from runtime.torch.ranks import HERE, run

pytestmark = pytest.mark.torch
NOISE = 0.05
"""Of a block's time, as a standard deviation."""


def test_the_computation_is_separated_from_waits_in_every_layout(tmp_path: Path) -> None:
    run(2, HERE / "timing_job.py", tmp_path)
    fast, slow = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for layout in fast:
        # A busy machine only adds to a time.
        assert min(slow[layout]) > min(fast[layout]) + 0.2, layout


class Event:
    """A CUDA event on a clock that the test moves. The GPU passes it at once."""

    now = 0.0
    passed = True

    def record(self) -> None:
        self.at = Event.now

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'Event' object")

    def query(self) -> bool:
        return Event.passed

    def elapsed_time(self, ended: Event) -> float:
        return 1e3 * (ended.at - self.at)


class Block(nn.Linear):
    def forward(self, x: Any) -> Any:
        Event.now += 0.25
        return super().forward(x)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    found: list[Any] = []
    monkeypatch.setattr(Event, "now", 0.0)
    monkeypatch.setattr(Event, "passed", True)
    monkeypatch.setattr(timing, "_event", Event)
    monkeypatch.setattr(timing, "steps", timing.steps.__class__(lambda kind, **body: None))
    monkeypatch.setattr(timing.steps, "add", lambda step, compute: found.append(compute))
    yield found


def test_events_of_a_gpu_are_read_once_it_has_passed_them(found: list[Any]) -> None:
    blocks = [Block(2, 2) for _ in range(8)]
    timer = timing.StepTimer(blocks, torch.device("cuda"), local=False, blocks=blocks)
    for number in range(3):
        Event.passed = number != 1
        with timer.passes():
            for block in blocks:
                block(torch.ones(2))
                Event.now += 1.0  # waits for parameters
        for block in blocks:  # an evaluation
            block(torch.ones(2))
        timer.end_step()
        assert len(found) == (1, 1, 3)[number]
    # Of the first step, the whole time is unknown. Four of eight blocks are measured.
    assert found == [None, *[pytest.approx(8 * 0.25 * timing.PASSES)] * 2]


def pickled(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    copied: nn.Module = torch.load(file, weights_only=False)
    return copied


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("local", [True, False], ids=["whole", "blocks"])
def test_a_copy_of_a_measured_model_is_its_own(copied: Any, local: bool, found: list[Any]) -> None:
    """Such as a moving average, or a stored model. Events of a GPU cannot be copied."""
    model = nn.Linear(2, 2)
    timer = timing.StepTimer([model], torch.device("cuda"), local=local, blocks=[model])
    for _ in range(2):
        with timer.passes():
            model(torch.ones(1, 2)).sum().backward()
            other = copied(model)
            with torch.no_grad():
                other.weight += 1.0
            assert not torch.equal(other(torch.ones(1, 2)), model(torch.ones(1, 2)))
        timer.end_step()
    assert found == [None, 0.0]


def test_a_compiled_model_is_one_graph() -> None:
    """Also if it is compiled after the timer was made, and with several micro-batches."""
    model = nn.Linear(2, 2)
    timer = timing.StepTimer([model], torch.device("cpu"))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for _ in range(3):
        with timer.passes():
            for _ in range(2):
                compiled(torch.ones(1, 2)).sum().backward()
        timer.end_step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def blocks_of_rank(steps: int, slower: float, seed: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a rank reports of ``steps`` steps with eight blocks, whose times vary by 5 %."""
    clock, noise, found = Clock(), random.Random(seed), []
    recorder = timing.steps.__class__(lambda kind, **body: found.extend(body["blocks"]))
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(timing, "steps", recorder)

    class Noisy(nn.Module):
        def forward(self) -> None:
            clock.now += 0.01 * slower * noise.gauss(1, NOISE)

    blocks = [Noisy() for _ in range(8)]
    timer = timing.StepTimer(blocks, torch.device("cpu"), local=False, blocks=blocks)
    for number in range(steps):
        with timer.passes():
            for block in blocks:
                block()
        clock.now += 0.3  # the backward pass, and waits for the others
        timer.end_step()
        if number % 100 == 99:
            recorder.write()
    return [stragglers.Block(*one) for one in found]


def search(ranks: int, steps: int, slow: float, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """All ranks that were ever slow. The last rank is ``slow`` times slower."""
    detector, named = stragglers.StragglerDetector(ranks), set[str]()
    rows = [
        blocks_of_rank(steps, slow if rank == ranks - 1 else 1.0, rank, monkeypatch)
        for rank in range(ranks)
    ]
    for step in zip(*rows, strict=True):
        for rank, block in enumerate(step):
            detector.add(f"rank-{rank}", "node0", 0, block)
        if found := detector.find():
            named |= set(found.processes)
    return named


def test_estimates_from_blocks_raise_no_false_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert search(3, 10_000, 1.0, monkeypatch) == set()
    assert search(3, 100, 1.1, monkeypatch) == {"rank-2"}
