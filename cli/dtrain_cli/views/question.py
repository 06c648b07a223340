"""What a plan is asked for and what training with it takes, in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dtrain.framing import clean
from dtrain.parallelism.answer import explain
from dtrain.parallelism.question import Answer, Question
from dtrain_cli.views import names


def described(asked: Question, notes: Sequence[str]) -> list[tuple[str, str]]:
    """Titles and texts: the model, the cluster, the batch, each with its source, and notes."""
    shape, cluster = asked.shape, asked.cluster
    experts = (
        f", {shape.experts} experts of which each token uses {shape.experts_per_token}"
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
    return [*entries, *(("Note", clean(note)) for note in notes)]


def _source(text: str) -> str:
    return f" ({clean(text)})" if text else ""


def training_time(answer: Answer) -> str:
    """How long the tokens that were asked for take; empty if none were."""
    training = answer.training(answer.best)
    if not training:
        return ""
    return (
        f"{explain.large(training.tokens)} tokens take {explain.amount(training.days)} days on "
        f"{answer.question.cluster.gpus:,} GPUs: {training.steps:,} steps, "
        f"{training.gpu_hours:,.0f} GPU-hours, if nothing fails."
    )
