"""What failures cost a training: the best checkpoint interval, goodput, and expected time. Pure.

Failures are independent and arrive at a constant rate. With the interval τ between checkpoints, the
time δ that the job waits for a save, the time R from a failure to the first new step, and the mean
time M between failures, Daly's complete model (J. Daly, "A higher order estimate of the optimum
checkpoint interval for restart dumps", FGCS 22, 2006) gives the expected wall time for each τ
seconds of work. The goodput is the ratio of both:

    τ / (M · e^(R/M) · (e^((τ+δ)/M) - 1))

For rare failures it is 1 - δ/τ - (R + τ/2)/M: the expected training time ratio of arXiv 2410.21680,
section III, plus the time of saves.
"""

from __future__ import annotations

import math

from dtrain.records import dataclass

NODE = 8
"""GPUs of a node in the published rates."""
RATES = {
    "RSC-2 (arXiv 2410.21680)": 2.34,
    "Llama 3 (arXiv 2407.21783)": 1000 * 419 / (54 * 16_384 / NODE),
    "RSC-1 (arXiv 2410.21680)": 6.50,
}
"""Failures in 1,000 node-days. Llama 3: 419 unexpected interruptions in 54 days on 16,384 GPUs."""
USUAL = "Llama 3 (arXiv 2407.21783)"
RESTART = 600.0
"""Seconds from a failure to the first new step, without the load of the checkpoint. MegaScale
(arXiv 2402.15627) detects and diagnoses a failure in less than 10 minutes."""
STORAGE_OF_HOST = 1.0
"""GB/s that each host writes to shared storage. Llama 3's storage sustained 2,000 GB/s for about
2,000 hosts (arXiv 2407.21783, section 3.3.1)."""
BYTES = {"runtime": 12, "torchtitan": 12, "megatron": 14}
"""Bytes of a parameter in a checkpoint: weights and Adam's two moments in fp32. Megatron-LM also
stores bf16 weights: 2.3 TiB for BLOOM's 176B parameters."""
LEAST = 0.001
"""A job with less goodput never ends."""


@dataclass(frozen=True, slots=True)
class Reliability:
    """What a plan assumes about failures. None means the default."""

    failures: float | None = None
    """Failures in 1,000 node-days; a node has 8 GPUs."""
    restart: float = RESTART
    """Seconds from a failure to the first new step, without the load of the checkpoint."""
    storage: float | None = None
    """GB/s with which all hosts together write and read a checkpoint."""


@dataclass(frozen=True, slots=True)
class FailureCost:
    """A training with failures, with the best checkpoint interval. Times in seconds, if not
    named otherwise; ``inf`` if the job fails too often to make progress."""

    failures_per_1000_node_days: float
    source: str
    """Where the rate is from; empty if the user gave it."""
    seconds_between_failures: float
    restart_s: float
    """With the load of the checkpoint."""
    checkpoint_gb: float
    save_s: float
    interval_s: float
    goodput: float
    """Share of the time that advances the training, from 0 to 1."""
    days: float
    gpu_hours: float
    days_at_least: float
    """With the lowest published rate; equal to ``days`` if the user gave a rate."""
    days_at_most: float


def cost(
    assumed: Reliability,
    *,
    parameters: int,
    backend: str,
    gpus: int,
    hosts: int,
    nodes: float,
    step: float,
    days: float,
) -> FailureCost:
    """Return what failures add to a training of ``days``, with ``step`` seconds for each step.
    ``nodes``: in the unit of the rates, `NODE` GPUs; a host without GPUs is one.
    """
    size = parameters * BYTES[backend] / 1e9
    save = size / (assumed.storage or STORAGE_OF_HOST * hosts)
    restart = assumed.restart + save

    def expected(rate: float) -> tuple[float, float, float]:
        between = 86_400_000 / (rate * nodes)
        interval = max(step, best_interval(save, between))
        return between, interval, goodput(interval, save, restart, between)

    rate = RATES[USUAL] if assumed.failures is None else assumed.failures
    between, interval, share = expected(rate)
    rates = RATES.values() if assumed.failures is None else [rate]
    most, least = (_with(days, expected(one)[2]) for one in (max(rates), min(rates)))
    total = _with(days, share)
    return FailureCost(
        failures_per_1000_node_days=rate,
        source=USUAL if assumed.failures is None else "",
        seconds_between_failures=between,
        restart_s=restart,
        checkpoint_gb=size,
        save_s=save,
        interval_s=interval,
        goodput=share,
        days=total,
        gpu_hours=total * 24 * gpus,
        days_at_least=least,
        days_at_most=most,
    )


def best_interval(save: float, between: float) -> float:
    """Return the seconds of work between two checkpoints that cost the least.

    ``save`` is the time of a save, ``between`` the mean time between failures. Daly 2006, equation
    37; its first term is J. Young, "A first order approximation to the optimum checkpoint
    interval", CACM 17 (1974).
    """
    if save >= 2 * between:
        return between
    ratio = math.sqrt(save / (2 * between))
    return math.sqrt(2 * save * between) * (1 + ratio / 3 + ratio**2 / 9) - save


def goodput(interval: float, save: float, restart: float, between: float) -> float:
    """Return the share of the time that advances the training; all times in seconds."""
    try:
        wall = between * math.exp(restart / between) * math.expm1((interval + save) / between)
    except OverflowError:
        return 0.0
    return interval / wall


def _with(days: float, share: float) -> float:
    return days / share if share >= LEAST else math.inf
