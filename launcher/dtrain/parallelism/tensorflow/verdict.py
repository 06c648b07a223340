"""The answer for ``--framework tensorflow``: each strategy, and a split by hand."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.cost.keras_memory import KerasMemory, Way


@dataclass(frozen=True, slots=True)
class Verdict:
    """What comes of one strategy, by the name that a cluster file gives it."""

    name: str
    fits: bool
    where: str
    """The devices that ``memory`` is of, and how many replicas there are."""
    way: Way
    """The fastest that fits, or the one that needs least."""
    memory: KerasMemory
    host_gib: float
    """Of each host's own memory, for variables that live there; else 0."""
    reason: str


@dataclass(frozen=True, slots=True)
class Placed:
    """What one GPU of a host holds when the model is split by hand."""

    gpu: int
    first: int
    """First of its layers; ``layers`` 0 means that it has none."""
    layers: int
    embedding: bool
    head: bool
    memory: KerasMemory

    @property
    def what(self) -> str:
        """Such as ``embedding, layers 0-9``."""
        parts = ["embedding"] if self.embedding else []
        if self.layers:
            last = self.first + self.layers - 1
            parts.append(f"layers {self.first}-{last}" if self.layers > 1 else f"layer {last}")
        return ", ".join(parts + (["output layer"] if self.head else [])) or "nothing"


@dataclass(frozen=True, slots=True)
class Assignment:
    """Layers to the GPUs of one host, by ``tf.device`` scopes; every host holds the same."""

    gpus: tuple[Placed, ...]
    way: Way
    fits: bool

    @property
    def fullest(self) -> Placed:
        return max(self.gpus, key=lambda placed: placed.memory.total)


@dataclass(frozen=True, slots=True)
class TensorFlowPlan:
    """The answer for ``--framework tensorflow``."""

    verdicts: tuple[Verdict, ...]
    """Of all strategies, the best that fits first."""
    assignment: Assignment | None
    """Where no strategy holds the model; it may not fit either."""
    torch: Candidate | None
    """What torch would do where no strategy holds the model on its GPUs, if it can."""
    limit: float
    """GiB of one GPU that may be used."""
    sentence: str
    notes: tuple[str, ...]
    """Ways past the strategies, and why they are not offered."""

    @property
    def strategy(self) -> Verdict | None:
        """The one to use."""
        return self.verdicts[0] if self.verdicts[0].fits else None

    def to_document(self) -> dict[str, Any]:
        """For ``--json``: GiB, counts and sentences."""
        assignment = self.assignment
        best = self.strategy
        return {
            "framework": "tensorflow",
            "strategy": best.name if best else None,
            "sentence": self.sentence,
            "limit_gib": _rounded(self.limit),
            "strategies": [
                {
                    "name": verdict.name,
                    "fits": verdict.fits,
                    "where": verdict.where,
                    **asdict(verdict.way),
                    "memory_gib": _parts(verdict.memory),
                    "host_memory_gib": _rounded(verdict.host_gib),
                    "reason": verdict.reason,
                }
                for verdict in self.verdicts
            ],
            "assignment": assignment
            and {
                "fits": assignment.fits,
                **asdict(assignment.way),
                "gpus": [
                    {
                        "gpu": placed.gpu,
                        "holds": placed.what,
                        "first_layer": placed.first if placed.layers else None,
                        "layers": placed.layers,
                        "embedding": placed.embedding,
                        "head": placed.head,
                        "memory_gib": _parts(placed.memory),
                    }
                    for placed in assignment.gpus
                ],
            },
            "torch": self.torch
            and {
                **asdict(self.torch.layout),
                **asdict(self.torch.assumed),
                "memory_gib": _rounded(self.torch.memory.total),
                "step_s": _rounded(self.torch.time.total, 3),
            },
            "notes": list(self.notes),
        }


def _parts(memory: KerasMemory) -> dict[str, float]:
    parts = {name: _rounded(value) for name, value in asdict(memory).items()}
    return {**parts, "total": _rounded(memory.total)}


def _rounded(value: float, digits: int = 2) -> float:
    return round(value, digits)
