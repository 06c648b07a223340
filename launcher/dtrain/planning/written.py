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

    question = answer.question
    keys = keys_of(question, answer.best.layout) | {"expected": _expected(answer)}
    narrow, hides, graph = question.narrow_states, question.hides_exchange, question.one_graph
    switches = (
        ("state_bits", narrow, 16 if narrow else 32),
        ("overlap_experts", hides, hides),
        ("cuda_graph", graph, graph),
    )
    for key, on, value in switches:
        # The value of an earlier plan must not stay.
        if on or key in (text or ""):
            keys["training"][key] = value
    if text is not None:
        return write_layout(text, keys, file=file)
    cluster = question.cluster
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
