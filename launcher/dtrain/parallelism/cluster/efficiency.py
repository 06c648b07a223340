"""The share of vendors' nominal speeds that training reaches: the planner's measured constants."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the hardware's nominal speed. Times are in seconds, sizes in bytes or FLOP.

    A matrix product of F FLOP runs at ``gemm · F / (F + gemm_half)`` of the peak, a transfer of V
    bytes at ``link · V / (V + link_half)`` of the link: every measured curve has a fixed cost at
    one end and a plateau at the other.
    """

    gemm: float = 0.80
    """Share of the peak that large matrix products sustain."""
    fp8: float = 0.9
    """Fraction of that share with fp8; casts and transposes take the rest."""
    gemm_half: float = 4e9
    """FLOP at which a matrix product reaches half of that."""
    attention: float = 0.55
    """Share of the peak in the forward pass of flash attention; the backward's is 0.8 of it."""
    scores: float = 6.0
    """Times that the score matrix passes through memory in attention that keeps it."""
    stream: float = 0.75
    """Share of the memory bandwidth that element-wise kernels sustain."""
    passes: float = 1.0
    """Times that activations pass through memory, as a multiple of the count of fused kernels."""
    launch: float = 6e-6
    """Host time to start one kernel."""
    link: float = 0.78
    """Share of the link that a collective within a host sustains."""
    link_half: float = 12e6
    network: float = 0.73
    network_half: float = 85e6
    latency: float = 12e-6
    """Time of one collective before the first byte."""
    hop: float = 5e-6
    """Time for each additional host in a ring."""
    bucket: float = 160e6
    """Bytes of gradients in one reduction."""
    fixed: float = 0.01
    """Time of one step for data, logging and the reduction of the loss."""
    exposed_data: float = 0.35
    """Minimum exposed share of the data-parallel traffic, however long the computation is."""
    overlap: float = 0.7
    """Share of the computation that data-parallel traffic can hide behind."""
    exposed_tensor: float = 1.0


AMPERE = Efficiency(
    gemm=0.714, gemm_half=6e9, attention=0.377, scores=5.1, passes=0.67, stream=0.718,
    launch=29e-6, hop=2e-5, exposed_tensor=0.7, exposed_data=0.374,
)  # fmt: skip
"""Fitted to public runs on A100s (Megatron-LM, MosaicML, InternEvo, torchtitan, vTrain)."""
HOPPER = Efficiency(
    gemm=0.64, gemm_half=2e9, attention=0.48, passes=1.1, stream=0.75, launch=10e-6,
    hop=1e-5, exposed_tensor=0.3, exposed_data=0.1, fp8=0.84, fixed=0.02,
)  # fmt: skip
"""Fitted to public runs on H100s (Megatron-LM, NeMo, torchtitan), which overlap most of tensor
parallelism's traffic."""
BLACKWELL = Efficiency(
    gemm=0.45, gemm_half=5e9, attention=0.46, passes=2.0, stream=0.75, launch=8e-6,
    hop=1e-5, link=0.67, exposed_data=0.42, fixed=0.02,
)  # fmt: skip
"""Fitted to one source, Megatron-LM on 8 B200s (SimuMax), whose GPUs sustained 48 % of their
peak in plain matrix products."""
FAMILIES = {"ampere": AMPERE, "hopper": HOPPER, "blackwell": BLACKWELL}


def of_family(family: str) -> Efficiency:
    """Return the constants of an architecture, or of the nearest measured one."""
    return FAMILIES.get(family, HOPPER if family in ("ada", "cdna", "tpu") else AMPERE)
