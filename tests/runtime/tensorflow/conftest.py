"""TensorFlow tasks as real processes on loopback."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from support.limits import HANG
from support.ports import free_ports
from support.warm import server

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
RECIPES = REPOSITORY / "scripts" / "recipes"
CHECKS = HERE / "checks"
STEPS = 60
"""Of a run whose losses are compared. After about 80, training makes a rounding difference of
float32 a thousand times larger, and which differences there are depends on the processor."""


class Task:
    """One process, with its output as it comes."""

    def __init__(self, name: str, command: list[str], folder: Path, environment: Mapping[str, str]):
        self.name = name
        self.output = ""
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        folder.mkdir(parents=True, exist_ok=True)
        script, *arguments = command
        self.process = server("tensorflow").start(
            Path(script), *arguments, environment={**os.environ, **environment}, folder=folder
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, text: str, timeout: float = HANG) -> str:
        """The next line with ``text`` in it."""
        while (line := self._lines.get(timeout=timeout)) is not None:
            self.output += line
            if text in line:
                return line
        raise AssertionError(f"{self.name} ended without {text!r}:\n{self.output}")

    def wait(self, timeout: float = HANG) -> int:
        """Its exit status, negative for a signal."""
        while (line := self._lines.get(timeout=timeout)) is not None:
            self.output += line
        return self.process.wait(timeout)

    def succeeds(self) -> str:
        """Its whole output, after it has ended without an error."""
        status = self.wait()
        assert status == 0, f"{self.name} ended with {status}:\n{self.output}"
        return self.output

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


Start = Callable[..., dict[str, Task]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """``start(strategy, command, worker=2, …)`` starts every task of a job, each in its own folder,
    and returns them by name. Without roles it starts one process without TF_CONFIG."""
    started: list[Task] = []

    def start_tasks(
        strategy: str, command: list[object], environment: Mapping[str, str] = {}, **roles: int
    ) -> dict[str, Task]:
        ports = iter(free_ports(sum(roles.values())))
        cluster = {
            role: [f"127.0.0.1:{next(ports)}" for _ in range(count)]
            for role, count in roles.items()
            if role != "evaluator"
        }
        tasks = {}
        for role, index in [(role, i) for role, n in roles.items() for i in range(n)] or [("", 0)]:
            name = f"{role}-{index}"
            config = {"cluster": cluster, "task": {"type": role, "index": index}}
            own = {"TF_CONFIG": json.dumps(config)} if role else {}
            tasks[name] = Task(
                name,
                [str(part) for part in command],
                tmp_path / name,
                {**base_environment(), "DTRAIN_STRATEGY": strategy, **own, **environment},
            )
            started.append(tasks[name])
        return tasks

    yield start_tasks
    for task in started:
        if task.process.poll() is None:
            os.killpg(task.process.pid, signal.SIGKILL)
        task.process.wait()


def base_environment() -> dict[str, str]:
    paths = [str(REPOSITORY / "launcher"), str(RECIPES), str(REPOSITORY / "tests")]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DTRAIN_START_TIMEOUT": str(HANG),
    }


def losses(path: Path) -> dict[int, float]:
    """The loss of each step, from a recipe's file."""
    return {int(step): loss for step, loss in json.loads(path.read_text()).items()}


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the images recipe in a single process without any strategy."""
    folder = tmp_path_factory.mktemp("alone")
    options = ["--loop", "custom", "--steps", STEPS, "--losses", folder / "losses.json"]
    task = Task(
        "alone",
        [str(RECIPES / "classify_images.py"), *map(str, options)],
        folder,
        {**base_environment(), "DTRAIN_STRATEGY": "none"},
    )
    assert "held-out accuracy" in task.succeeds()
    return losses(folder / "losses.json")


@pytest.fixture(scope="session")
def equal(alone: dict[int, float]) -> Callable[[dict[int, float]], bool]:
    """Whether losses are those of the single process, in float32's own accuracy: a gradient that
    is off by one sample in a batch of 64 is off by hundreds of times more."""

    def compare(found: dict[int, float]) -> bool:
        expected = {step: alone[step] for step in found}
        return bool(found) and found == pytest.approx(expected, rel=1e-4, abs=1e-5)

    return compare
