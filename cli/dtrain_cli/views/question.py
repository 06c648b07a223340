"""The planner's question, and the training time of its answer, as text. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dtrain.framing import clean
from dtrain.parallelism.answer import explain
from dtrain.parallelism.question import Answer, Question, RunError, TrainingCost
from dtrain_cli.options import as_options
from dtrain_cli.views import names


def described(asked: Question, notes: Sequence[str]) -> list[tuple[str, str]]:
    """Return titles and texts: model, cluster and batch, each with its source, and notes."""
    shape, cluster = asked.shape, asked.cluster
    experts = (
        f", {shape.experts} experts, {shape.experts_per_token} for each token"
        if shape.experts
        else ""
    )
    active = (
        f" ({explain.large(shape.active_parameters)} active)"
        if shape.active_parameters != shape.parameters
        else ""
    )
    name = f"{clean(shape.name)}, " if shape.name else ""
    model = (
        f"{name}{explain.large(shape.parameters)} parameters{active}: {shape.layers} layers of "
        f"hidden size {shape.hidden:,}, {shape.heads} heads ({shape.kv_heads} for keys and "
        f"values), MLP {shape.ffn_hidden:,}{' (gated)' if shape.gated else ''}{experts}, "
        f"vocabulary {shape.vocab:,}, sequences of {shape.seq_len:,} tokens"
    )
    wires = ""
    if cluster.hosts > 1:
        wires = (
            f" in {cluster.hosts:,} hosts of {cluster.gpus_per_host}, "
            f"{cluster.network * 8:g} Gb/s between hosts"
        )
    elif cluster.gpus > 1:
        wires = " in one host"
    gpus = f"{cluster.gpus:,} × {cluster.gpu.name}{wires}{_source(asked.cluster_source)}"
    tokens = explain.large(asked.global_batch * shape.seq_len)
    batch = (
        f"{names.count(asked.global_batch, 'sequence')} = {tokens} tokens a step, in "
        f"{asked.precision}{_source(asked.batch_source)}"
    )
    entries = [("Model", model), ("Cluster", gpus), ("Batch", batch)]
    entries += [("Learned", _calibration(one)) for one in asked.calibration]
    return [*entries, *(("Note", as_options(clean(note))) for note in notes)]


def _calibration(error: RunError) -> str:
    before, after = (
        f"{explain.seconds(estimate)} ({(estimate / error.measured_s - 1) * 100:+.0f} %)"
        for estimate in (error.before_s, error.after_s)
    )
    return (
        f"a step of run {clean(error.run)} took {explain.seconds(error.measured_s)}; estimated "
        f"before: {before}, with calibration: {after}"
    )


def _source(text: str) -> str:
    return f" ({as_options(clean(text))})" if text else ""


def training_time(answer: Answer) -> str:
    """Return how long training on the given number of tokens takes; empty without a number."""
    training = answer.training(answer.best)
    if not training:
        return ""
    return (
        f"{explain.large(training.tokens)} tokens take {explain.amount(training.days)} days on "
        f"{explain.count(answer.question.cluster.gpus, 'GPU')}: {training.steps:,} steps, "
        f"{training.gpu_hours:,.0f} GPU-hours, if nothing fails. {_failures(training)}"
    )


def _failures(training: TrainingCost) -> str:
    """Return what failures add to a training."""
    found = training.with_failures
    rate = f"{found.failures_per_1000_node_days:.2g} in 1,000 days of 8 GPUs"
    source = f", as {found.source.partition(' (')[0]} had" if found.source else ""
    often = f"a failure every {names.duration(found.seconds_between_failures)} ({rate}{source})"
    if not math.isfinite(found.days):
        return f"With {often}, it never ends: it fails before it saves a checkpoint."
    least, most = map(explain.amount, (found.days_at_least, found.days_at_most))
    spread = f" ({least} to {most} with other published rates)" if least != most else ""
    price = "" if training.price is None else f" at a price of {training.price:,.0f}"
    return (
        f"With failures, expect {explain.amount(found.days)} days{spread} and "
        f"{found.gpu_hours:,.0f} GPU-hours{price}, a goodput of {found.goodput * 100:.1f} %: "
        f"{often}, "
        f"{names.duration(found.restart_s)} until it trains again, and a checkpoint of "
        f"{found.checkpoint_gb:,.0f} GB, saved in {names.duration(found.save_s)}, every "
        f"{names.duration(found.interval_s)}."
    )
