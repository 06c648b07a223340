"""The share of vendors' nominal speeds that training reaches: the planner's measured constants."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dtrain.parallelism.cluster.hardware import Precision


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
    nvfp4: float = 0.5
    """Fraction of that share with nvfp4, including the layers that stay in bf16."""
    gemm_half: float = 4e9
    """FLOP at which a matrix product reaches half of that."""
    attention: float = 0.55
    """Share of the peak in the forward pass of flash attention; the backward's is 0.8 of it."""
    flash2: float = 1.0
    """Fraction of that share with FlashAttention-2, PyTorch's own. Newer GPUs need a newer version:
    on H100s it reaches half of FlashAttention-3's speed (arXiv 2407.08608)."""
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
    """Time for each doubling of the hosts."""
    bucket: float = 160e6
    """Bytes of gradients in one reduction."""
    fixed: float = 0.01
    """Time of one step for data, logging and the reduction of the loss."""
    exposed_data: float = 0.35
    """Minimum exposed share of the data-parallel traffic, however long the computation is."""
    overlap: float = 0.7
    """Share of the computation that data-parallel traffic can hide behind."""
    exposed_tensor: float = 1.0
    exposed_expert: float = 1.0
    """Exposed share of the exchange of tokens between experts."""
    interval_low: float = 0.6
    interval_high: float = 1.6
    """Measured step times as multiples of the estimate: 80 % of the runs of publishers that the fit
    has not seen are between these two (``scripts/planner/fit.py --held-out``). The default, for
    architectures without measurements, is a guess: wider than all measured ones."""

    def gemm_share(self, precision: Precision) -> float:
        """Share of the peak for ``precision`` that large matrix products sustain."""
        return self.gemm * {"fp8": self.fp8, "nvfp4": self.nvfp4}.get(precision, 1.0)


AMPERE = Efficiency(
    gemm=0.71, gemm_half=6e9, attention=0.37, scores=5.1, passes=0.75, stream=0.77,
    launch=29e-6, hop=2e-5, exposed_tensor=1.0, exposed_data=0.37,
    interval_low=0.91, interval_high=1.26,
)  # fmt: skip
"""Fitted to public runs on A100s (Megatron-LM, MegaScale, BLOOM, MosaicML, InternEvo, torchtitan,
vTrain)."""
HOPPER = Efficiency(
    gemm=0.67, gemm_half=2e9, attention=0.6, flash2=0.56, passes=2.0, stream=0.75, launch=10e-6,
    hop=1e-5, exposed_tensor=0.3, exposed_data=0.1, fp8=0.92, fixed=0.02,
    interval_low=0.83, interval_high=1.13,
)  # fmt: skip
"""Fitted to public runs on H100s (Megatron-LM, NeMo, Megatron-Bridge, torchtitan). Megatron-LM
overlaps most of tensor parallelism's traffic there."""
BLACKWELL = Efficiency(
    gemm=0.56, gemm_half=5e9, attention=0.5, flash2=0.56, passes=1.0, stream=0.75, launch=8e-6,
    hop=1e-5, link=0.67, exposed_data=0.97, exposed_expert=1.0, fp8=1.0, nvfp4=0.8,
    fixed=0.02,
    interval_low=0.80, interval_high=1.18,
)  # fmt: skip
"""Fitted to Megatron-Bridge on B200s and GB200s, and to Megatron-LM on 8 B200s (SimuMax), which
sustained 48 % of their peak in plain matrix products, and so count as GPUs of 0.8 of the speed."""
OLDER = replace(AMPERE, flash2=0.5)
"""Volta and Turing have no FlashAttention-2, which is twice as fast as PyTorch's kernel that takes
its place there (arXiv 2307.08691)."""
FAMILIES = {"ampere": AMPERE, "hopper": HOPPER, "blackwell": BLACKWELL}


def of_family(family: str) -> Efficiency:
    """Return the constants of an architecture, or of the nearest measured one."""
    if family in FAMILIES:
        return FAMILIES[family]
    unknown = Efficiency()
    if family in ("volta", "turing"):
        return replace(
            OLDER, interval_low=unknown.interval_low, interval_high=unknown.interval_high
        )
    nearest = HOPPER if family in ("ada", "cdna", "tpu") else AMPERE
    return replace(nearest, interval_low=unknown.interval_low, interval_high=unknown.interval_high)
