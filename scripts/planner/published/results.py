"""The measured results of a published run: the time of a step and the memory peak."""

from __future__ import annotations

import re

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cluster.hardware import GpuCluster
from dtrain.parallelism.cost.speed import Speed, speed
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import Layout
from planner.published.rows import Row, count, number
from planner.published.sources import Counter, Practice

_RATES = (
    "reported_tokens_per_s_per_gpu",
    "reported_tflops_per_gpu",
    "reported_mfu_pct",
    "reported_hfu_pct",
)


def has_rate(row: Row) -> bool:
    return any(number(row, column) is not None for column in _RATES)


def seconds_of(
    row: Row,
    practice: Practice,
    shape: Shape,
    layout: Layout,
    assumed: Assumptions,
    cluster: GpuCluster,
) -> float | None:
    """Seconds of one step, from the most direct reported figure.

    In this order: the step's time; tokens/s; TFLOP/s; MFU; HFU, all per GPU. FLOP are model FLOP,
    with attention over the whole square (72·B·L·s·h²(1 + s/(6h) + V/(12·h·L)), RAR), unless the
    notes say hardware FLOP or causal. For the Megatron family of 2021 and 2022 and for InternEvo,
    TFLOP/s with full recomputation are hardware FLOP (SC21 eq. 3). MFU is relative to the dense
    peak of the run's precision.
    """
    notes = row.get("notes", "")
    if (seconds := number(row, "reported_step_time_s")) is not None:
        batch = count(row, "global_batch") or layout.global_batch
        return seconds * layout.global_batch / batch
    # The other figures are rates: compute them for a step of one second.
    unit: Speed = speed(shape, layout, cluster, assumed, 1.0)
    peak = cluster.gpu.flops[assumed.precision]
    causal = re.search(r"(?<!non-)(?<!non )\bcausal", notes, re.IGNORECASE) is not None
    mfu = unit.mfu_causal if causal else unit.mfu
    if (tokens := number(row, "reported_tokens_per_s_per_gpu")) is not None:
        return unit.tokens_per_s_per_gpu / tokens
    if (tflops := number(row, "reported_tflops_per_gpu")) is not None:
        counted = re.search(r"(hardware|model) T?FLOP", notes, re.IGNORECASE)
        every = practice.hardware_flops and layout.recompute == "full"
        if counted:
            every = counted[1].casefold() == "hardware"
        return (unit.hfu if every else mfu) * peak / tflops
    for column, share in (("reported_mfu_pct", mfu), ("reported_hfu_pct", unit.hfu)):
        if (percent := number(row, column)) is not None:
            return share / (percent if percent <= 1 else percent / 100)
    return None


def memory_of(row: Row, practice: Practice) -> tuple[float | None, Counter]:
    """GiB at the peak, and which counter reported it.

    The notes override the source's default: torchtitan prints the allocator's reserved bytes,
    SimuMax its allocated bytes; other sources are assumed to use the driver's figure. GB are GiB
    unless the notes call them decimal: PyTorch and nvidia-smi count in powers of two.
    """
    notes = row.get("notes", "").casefold()
    counter: Counter = practice.counter
    if exact := re.search(r"\ballocated ([\d.]+) mib\b", notes):
        return float(exact[1]) / 1024, "allocated"
    if re.search(r"(\b|_)reserved", notes):
        counter = "reserved"
    elif re.search(r"(\b|_)allocated", notes):
        counter = "allocated"
    elif re.search(r"nvidia-smi|driver", notes):
        counter = "total"
    peak = number(row, "reported_peak_mem_gb")
    if peak is not None and re.search(r"decimal gb|10\^9 bytes|1e9 bytes", notes):
        peak *= 1e9 / 2**30
    return peak, counter
