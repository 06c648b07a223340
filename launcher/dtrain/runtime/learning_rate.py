"""Learning rates for a different global batch size."""

from __future__ import annotations

import math
from typing import Literal


def scaled(
    rate: float, batch: int, base_batch: int, rule: Literal["linear", "sqrt"] = "linear"
) -> float:
    """Scale ``rate`` from a global batch of ``base_batch`` samples to one of ``batch`` samples.

    ``linear`` is for SGD (Goyal et al., arXiv 1706.02677, section 2.1), ``sqrt`` for Adam and
    similar optimizers (Malladi et al., arXiv 2205.10287). Raises ValueError for a batch below 1.
    """
    if batch < 1 or base_batch < 1:
        raise ValueError(f"batch sizes must be at least 1, not {batch} and {base_batch}")
    ratio = batch / base_batch
    return rate * (ratio if rule == "linear" else math.sqrt(ratio))


def warmed_up(rate: float, step: int, warmup: int) -> float:
    """The rate at ``step`` (from 0) of a gradual warm-up over ``warmup`` steps (arXiv 1706.02677,
    section 2.2)."""
    return rate * min(1.0, (step + 1) / warmup) if warmup > 0 else rate


def cosine(rate: float, step: int, total: int, warmup: int = 0, final: float = 0.1) -> float:
    """Warm-up, then half a cosine down to ``final`` times ``rate`` at step ``total``
    (arXiv 1608.03983)."""
    if step < warmup:
        return warmed_up(rate, step, warmup)
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return rate * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done)))
