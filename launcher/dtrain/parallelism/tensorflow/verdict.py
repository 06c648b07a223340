"""The answer for TensorFlow: each strategy, and a split by hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dtrain.parallelism.answer.document import SCHEMA, cluster, model, split
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.cost.keras_memory import KerasMemory, Way
from dtrain.parallelism.question import Question
from dtrain.records import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """The evaluation of one strategy, by its name in a cluster file."""

    name: str
    fits: bool
    where: str
    """The devices of ``memory``, and the number of replicas."""
    way: Way
    """The fastest way that fits, or the smallest."""
    memory: KerasMemory
    host_gib: float
    """GiB of each host's memory for variables that live there; else 0."""
    reason: str


@dataclass(frozen=True, slots=True)
class Placed:
    """The part of one GPU of a host, for a model that is split by hand."""

    gpu: int
    first: int
    """The first of its layers; ``layers`` is 0 if it has none."""
    layers: int
    embedding: bool
    head: bool
    memory: KerasMemory

    @property
    def what(self) -> str:
        """Its content, such as ``embedding, layers 0-9``."""
        parts = ["embedding"] if self.embedding else []
        if self.layers:
            last = self.first + self.layers - 1
            parts.append(f"layers {self.first}-{last}" if self.layers > 1 else f"layer {last}")
        return ", ".join(parts + (["output layer"] if self.head else [])) or "nothing"


@dataclass(frozen=True, slots=True)
class Assignment:
    """The layers of each GPU of one host, by ``tf.device`` scopes, the same on every host."""

    gpus: tuple[Placed, ...]
    way: Way
    fits: bool

    @property
    def fullest(self) -> Placed:
        return max(self.gpus, key=lambda placed: placed.memory.total)


@dataclass(frozen=True, slots=True)
class TensorFlowPlan:
    """The answer for TensorFlow."""

    question: Question
    verdicts: tuple[Verdict, ...]
    """The verdicts on all strategies, with the best that fits first."""
    assignment: Assignment | None
    """A split by hand, if no strategy holds the model; it may not fit either."""
    torch: Candidate | None
    """torch's best layout, if no strategy holds the model on its GPUs and torch can."""
    limit: float
    """Usable GiB of one GPU."""
    sentence: str
    notes: tuple[str, ...]
    """Ways besides the strategies, and why dtrain does not offer them."""

    @property
    def strategy(self) -> Verdict | None:
        """The recommended strategy."""
        return self.verdicts[0] if self.verdicts[0].fits else None

    @property
    def fits(self) -> bool:
        """Whether a strategy or the split by hand holds the model."""
        by_hand = self.assignment is not None and self.assignment.fits
        return self.strategy is not None or by_hand

    def to_document(self) -> dict[str, Any]:
        """Return the document of `dtrain plan --json`: GiB, counts and sentences."""
        assignment = self.assignment
        best = self.strategy
        return {
            "schema": SCHEMA,
            "model": model(self.question),
            "cluster": cluster(self.question),
            "framework": "tensorflow",
            "strategy": best.name if best else None,
            "sentence": self.sentence,
            "limit_gib": round(self.limit, 2),
            "strategies": [
                {
                    "name": verdict.name,
                    "fits": verdict.fits,
                    "where": verdict.where,
                    **asdict(verdict.way),
                    "memory_gib": _parts(verdict.memory),
                    "host_memory_gib": round(verdict.host_gib, 2),
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
                **split(self.torch),
                "memory_gib": round(self.torch.memory.total, 2),
                "step_s": round(self.torch.time.total, 3),
            },
            "notes": list(self.notes),
        }


def _parts(memory: KerasMemory) -> dict[str, float]:
    parts = {name: round(value, 2) for name, value in asdict(memory).items()}
    return {**parts, "total": round(memory.total, 2)}
