"""The sequences in a step: those of the request or the cluster file, else a usual number."""

from __future__ import annotations

import math

from dtrain.diagnostics import UsageError
from dtrain.parallelism.cluster.hardware import GpuCluster
from dtrain.parallelism.model.shape import Shape
from dtrain.planning.request import PlanRequest
from dtrain.runtime.layout import Training
from dtrain.wording import plural

USUAL_BATCHES = ((1e9, 0.5e6), (200e9, 4e6), (math.inf, 16e6))
"""Default tokens in one step, for models with fewer parameters than the first number. GPT-3 used
0.5M for its models below 1B, and 3.2M for 175B (arXiv 2005.14165); Llama 3 405B 16M (arXiv
2407.21783), Nemotron-4 340B 9M (arXiv 2406.11704), DeepSeek-V2 38M (arXiv 2405.04434) and
DeepSeek-V3 63M (arXiv 2412.19437)."""
USUAL_SHARES = (1024, 65_536)
"""Least and most tokens of a step for each GPU. Llama 3 405B used 1,024 on 16,384 GPUs, nanoGPT
65,536 for GPT-2 on 8 GPUs: more only makes steps longer."""
WHOLE = 20e9
"""Parameters below which a GPU can compute the whole model, with sharded states: larger models are
split anyway."""
FINE_TUNING = 128
"""Default sequences in a step of fine-tuning, as in Tulu 3 (arXiv 2411.15124)."""


def batch_of(
    request: PlanRequest, training: Training, shape: Shape, cluster: GpuCluster
) -> tuple[int, str]:
    """Return the sequences in a step, and their source. ``training``: that of the cluster file."""
    if request.global_batch is not None:
        if request.global_batch < 1:
            given = f"`global_batch={request.global_batch}`"
            raise UsageError(f"{given} is not a batch", hint="at least 1 sequence")
        return request.global_batch, ""
    if training.global_batch:
        return training.global_batch, f"from {request.file}"
    batch = usual_batch(shape, cluster.gpus)
    if shape.lora is not None:
        batch = _for_fine_tuning(batch, cluster.gpus)
    return batch, "assumed: set `global_batch` to change it"


def usual_batch(shape: Shape, gpus: int) -> int:
    """Return sequences for about the tokens of `USUAL_BATCHES`, within `USUAL_SHARES` of each GPU;
    or one for each GPU that computes the whole model, if these have about the tokens of the next
    larger models at most.

    The number is a power of two times the odd part of the number of GPUs, so that data ranks get
    equal shares.
    """
    usual, *larger = (tokens for below, tokens in USUAL_BATCHES if shape.parameters < below)
    least, most = (share * gpus for share in USUAL_SHARES)
    tokens = min(max(usual, least), most)
    if shape.parameters < WHOLE and gpus * shape.seq_len < larger[0] * 2**0.5:
        # GPUs without a sequence of their own must split layers or sequences.
        tokens = max(tokens, gpus * shape.seq_len)
    odd = gpus
    while odd % 2 == 0:
        odd //= 2
    batch = odd
    while batch * shape.seq_len * 2**0.5 < tokens:
        batch *= 2
    return batch


def _for_fine_tuning(batch: int, gpus: int) -> int:
    """Return ``batch`` halved to about `FINE_TUNING` sequences, at least one for each GPU."""
    while batch > FINE_TUNING and batch % 2 == 0 and batch // 2 >= gpus:
        batch //= 2
    return batch


def too_few_tokens(cluster: GpuCluster, batch: int, seq_len: int) -> str:
    """Return a note if a step has few tokens for each GPU, else ''."""
    each, least = batch * seq_len / cluster.gpus, USUAL_SHARES[0]
    if each >= least or cluster.gpus == 1:
        return ""
    units = plural(cluster.gpus, cluster.gpu.unit)
    return (
        f"a step has only {each:,.0f} tokens for each of {cluster.gpus:,} {units}, which wait for "
        f"each other much of the time: fewer {units}, or {-(-least * cluster.gpus // seq_len):,} "
        "sequences or more, use them better"
    )
