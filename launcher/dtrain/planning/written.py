"""Writes the best layout of a plan to a cluster file."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dtrain.parallelism.cost.speed import flop_per_token
from dtrain.parallelism.question import Answer, Question
from dtrain.runtime.layout import Layout


def written(answer: Answer, text: str | None, *, file: str) -> str:
    """Return the cluster file ``text`` with the best layout, or a new file if ``text`` is None.

    ``file`` is the name for messages. Raises SpecError if ``text`` is not a cluster file.
    """
    from dtrain.spec.edit import new_file, write_layout

    keys = keys_of(answer.question, answer.best.layout) | {"expected": _expected(answer)}
    training = keys["training"]
    narrow = answer.question.narrow_states
    if narrow or "state_bits" in (text or ""):
        # The value of an earlier plan must not stay.
        training["state_bits"] = 16 if narrow else 32
    hides = answer.question.hides_exchange
    if hides or "overlap_experts" in (text or ""):
        training["overlap_experts"] = hides
    graph = answer.question.one_graph
    if graph or "cuda_graph" in (text or ""):
        training["cuda_graph"] = graph
    if text is not None:
        return write_layout(text, keys, file=file)
    cluster = answer.question.cluster
    width = max(2, len(str(cluster.hosts)))
    return new_file(
        [f"gpu{number:0{width}}" for number in range(1, cluster.hosts + 1)],
        cluster.gpus_per_host,
        keys,
        gpu=cluster.gpu.name,
        gbps=cluster.network * 8,
        file=file,
    )


def _expected(answer: Answer) -> dict[str, object]:
    """The values of `job.expected`, each with four digits."""
    best, question = answer.best, answer.question
    time = best.time
    values = {
        "step_time": time.total,
        "compute_time": time.compute + time.recompute + time.host,
        "memory_gib": best.memory.total,
        "gflop_per_token": flop_per_token(question.shape) / 1e9,
        "peak_tflops": question.cluster.gpu.peak(question.precision),
    }
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def keys_of(question: Question, layout: Layout) -> dict[str, Any]:
    """Return ``strategy``, ``layout`` and ``training`` for the ``job`` of a cluster file."""
    # Import here: only written plans need it.
    from dtrain.spec.layouts import strategy_of

    plain = asdict(Layout())
    always = {"tensor", "pipeline", "data", "sharding", "micro_batch", "grad_accumulation"}
    if layout.tensor > 1:
        # Write it even if off, because a strategy may turn it on.
        always.add("sequence_parallel")
    return {
        "strategy": strategy_of(layout) if layout.backend == "runtime" else "none",
        "layout": {
            name: value
            for name, value in asdict(layout).items()
            if name in always or value != plain[name]
        },
        "training": {
            "global_batch": layout.global_batch,
            "precision": question.precision,
            "seq_len": question.shape.seq_len,
        },
    }
