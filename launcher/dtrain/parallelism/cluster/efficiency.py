"""The share of vendors' nominal speeds that training reaches: the planner's measured constants."""

from __future__ import annotations

import math
from dataclasses import replace

from dtrain.parallelism.cluster.hardware import Gpu, Precision
from dtrain.records import KeepsHash, dataclass

OVERLAPPED = 0.2
"""Seconds that a second of communication adds to the computation beside it: kernels that overlap
slow each other by 10 to 40 %, as they share memory bandwidth and multiprocessors."""


@dataclass(frozen=True, slots=True)
class Efficiency(KeepsHash):
    """Shares of the hardware's nominal speed. Times are in seconds, sizes in bytes or FLOP.

    A matrix product of F FLOP runs at ``gemm · F / (F + gemm_half)`` of the peak. A collective
    takes the time of its start, and then that of its bytes: 8 A100s reduce 8 MB at a bus bandwidth
    of 110 GB/s and 1 GB at 229 GB/s (stas00/ml-engineering), and here at 109 and 233.
    """

    gemm: float = 0.80
    """Share of the peak that large matrix products sustain."""
    fp8: float = 0.9
    """Fraction of that share with fp8. Not fitted, but measured in large matrix products: 70.9 of
    80.3 % of the peak on H100s, 76.3 of 77.6 % on B200s, and 72.3 of 72.9 % on GB200s (maximum
    achievable matmul FLOPS, stas00/ml-engineering)."""
    nvfp4: float = 0.98
    """Fraction of that share with nvfp4, whose products are twice as fast as fp8's (arXiv
    2509.25149). Recipes that keep layers in bf16 are slower."""
    gemm_half: float = 4e9
    """FLOP at which a matrix product reaches half of that."""
    attention: float = 0.55
    """Share of the peak in the forward pass of flash attention; the backward's is 0.8 of it."""
    flash2: float = 1.0
    """Fraction of that share with FlashAttention-2, PyTorch's own. Newer GPUs need a newer version:
    on H100s it reaches half of FlashAttention-3's speed (arXiv 2407.08608)."""
    head_multiple: float = 1.0
    """Elements to a multiple of which flash attention pads a head: 128 lanes of a TPU's arrays."""
    scores: float = 6.0
    """Times that the score matrix passes through memory in attention that keeps it."""
    stream: float = 0.75
    """Share of the memory bandwidth that element-wise kernels sustain."""
    launch: float = 25e-6
    """Host time to start one of PyTorch's kernels, with its share of Python. Without compilation,
    gpt-fast generates 25.5 tokens/s with Llama-7B on an A100, limited by the host: 1.2 ms for about
    50 kernels of a layer (pytorch.org/blog/accelerating-generative-ai-2). It depends on the host,
    and differs between GPUs as far as their published runs come from other hosts and software."""
    gap: float = 0.9e-6
    """Seconds from one kernel to the next if the host has started both ahead of time. Kernels of
    2.9 µs follow each other every 3.8 µs on a V100 (developer.nvidia.com/blog/cuda-graphs)."""
    stalls: float = 0.4
    """Share of the launches in layers with experts for which the GPU waits. Chosen for
    Megatron-Bridge on H100s; on H800s, XTuner's runs then are 2 % too slow on average."""
    link: float = 0.78
    """Share of the link that a collective within a host sustains."""
    network: float = 0.73
    """Share of the network that a collective between hosts sustains."""
    exchange: float = 0.9
    """Share of the network that the exchange of tokens between hosts sustains. Every pair of hosts
    sends at once, so no ring has to start: DeepEP measures 43 to 58 GB/s of ports of 50 GB/s,
    counting tokens for its own host."""
    latency: float = 12e-6
    """Time of one collective before the first byte."""
    link_step: float = 3.4e-6
    """Time of one step to the next member in a host (NCCL, ``tuning.cc``: ring, NVLink, Simple)."""
    network_step: float = 14e-6
    """Time of one step to the next host (the same table: network)."""
    fixed: float = 0.01
    """Time of one step for data, logging and the reduction of the loss."""
    exposed_data: float = OVERLAPPED
    """Exposed share of the data-parallel traffic beside the computation."""
    exposed_tensor: float = 1.0
    """Exposed share of tensor-parallel traffic in software that hides it behind products."""
    interval_low: float = 0.6
    interval_high: float = 1.9
    """Step times as multiples of the estimate, between which 80 % of runs are. The default, for
    GPUs that are not `MEASURED`, is a guess: on those with published runs, 80 % of 399 step times
    of dense models are 0.80 to 1.68 times the estimate, with equal weight for each of 40
    publishers."""

    def ring_start(self, members: int, hosts: float) -> float:
        """Seconds until data have passed through all members, one after the other."""
        inside = (members - hosts) * self.link_step
        return self.latency + inside + (hosts - 1) * self.network_step

    def tree_start(self, members: int, hosts: float) -> float:
        """Seconds until data have passed through a chain in each host and a tree of the hosts."""
        inside = (members / hosts - 1) * self.link_step
        return self.latency + inside + math.log2(hosts) * self.network_step

    def gemm_share(self, precision: Precision) -> float:
        """Share of the peak for ``precision`` that large matrix products sustain."""
        return self.gemm * {"fp8": self.fp8, "nvfp4": self.nvfp4}.get(precision, 1.0)


KNOWN = {"interval_low": 0.89, "interval_high": 1.40}
"""The interval of all `MEASURED` GPUs. They have one, because publishers' software differs more
than GPUs do, and because most of an architecture's publishers are its vendor. It is from 2,750
published step times of dense models on these GPUs, with equal weight for each of 102 publishers; of
2,916 and 122, 80 % are 0.87 to 1.38, without tables that are off by more than a factor of 2.7 on
average. Of publishers held
out of the fit, the ends are 0.92 and 1.09 (``scripts/planner/fit.py --held-out``), but most of
those are vendors' benchmarks."""

AMPERE = Efficiency(
    gemm=0.75, gemm_half=6e9, attention=0.59, scores=5.1, stream=0.89,
    launch=29e-6, exposed_data=0.69, **KNOWN,
)  # fmt: skip
"""Fitted to public runs on A100s (Megatron-LM, MegaScale, BLOOM, MosaicML, InternEvo, torchtitan,
vTrain). ``attention`` keeps the value of an earlier fit to all of them, because what a fit finds
depends on which publisher it leaves out: 0.45 to 0.65. FlashAttention-2 reaches 50 to 73 % of an
A100's peak in the forward pass (arXiv 2307.08691)."""
HOPPER = Efficiency(
    gemm=0.67, gemm_half=2e9, attention=0.42, flash2=0.56, stream=0.75, exposed_tensor=0.3,
    fp8=0.88, fixed=0.02, **KNOWN,
)  # fmt: skip
"""Fitted to public runs on H100s (Megatron-LM, NeMo, Megatron-Bridge, torchtitan).
``exposed_tensor`` is of the runs of NeMo and Megatron-Bridge, which overlap most of tensor
parallelism's traffic."""
BLACKWELL = Efficiency(
    gemm=0.6, gemm_half=5e9, attention=0.51, flash2=0.29, stream=0.75, launch=20e-6,
    link=0.67, stalls=0.15, fp8=0.98, fixed=0.02, **KNOWN,
)  # fmt: skip
"""Fitted to Megatron-Bridge on B200s and GB200s, and to Megatron-LM on 8 B200s (SimuMax), which
sustained 48 % of their peak in plain matrix products, and so count as GPUs of 0.8 of the speed.
Many of these runs start a layer's kernels at once, as CUDA graphs, and so wait less for the host.
FlashAttention-2 has none of Blackwell's instructions: it reaches 335 TFLOP/s on an H100 (arXiv
2307.08691), and ``flash2`` is as fast on a B200."""
OLDER = replace(AMPERE, flash2=0.5)
"""Volta and Turing have no FlashAttention-2, which is twice as fast as PyTorch's kernel that takes
its place there (arXiv 2307.08691)."""
TPU = replace(
    HOPPER, gemm=Efficiency().gemm, gemm_half=20e9, attention=Efficiency().attention, flash2=1.0,
    head_multiple=128, launch=0.0, gap=0.0,
)  # fmt: skip
"""Compiled programs do not wait for the host. ``gemm_half`` is from the experts' products in
AI-Hypercomputer/tpu-recipes; the rest is not fitted. The compiler overlaps traffic as on Hopper,
but Hopper's shares of the peak include the H100's power limit. In plain matrix products a v6e
sustains 90 % of its peak and a TPU7x 83 % (the same source, ``microbenchmarks``), an H100 80 %."""
WATTS = {
    "ampere": 400 / 312,
    "ada": 400 / 312,
    "blackwell-rtx": 400 / 312,
    "hopper": 700 / 989,
    "blackwell": 1200 / 2500,
}
"""Rated W for each TFLOP/s of the GPUs that an architecture's constants were fitted on: A100, H100
and GB200."""
CLOCK = 0.95
"""Highest share of the rated peak in large matrix products, of GPUs whose clock follows from their
power.
Chosen, not fitted: products also wait for memory. Without this limit, the estimate's MFU is 81 %
for Llama 3 70B on 8 H20s; with it, 77 %."""
MEASURED = {"ampere": {312}, "hopper": {989}, "blackwell": {2250, 2500}}
"""TFLOP/s in 16 bits of the GPUs whose runs the interval is from, by architecture. Of 14 published
runs on RTX 3090s and RTX A6000s, 5 are in the interval of the A100s."""
FAMILIES = {"ampere": AMPERE, "hopper": HOPPER, "blackwell": BLACKWELL}
_NEAREST = {"volta": OLDER, "turing": OLDER, "cdna": HOPPER, "tpu": TPU}


def of_family(family: str) -> Efficiency:
    """Return the constants of an architecture, or of the nearest measured one.

    Ada and the Blackwell of workstations multiply with Ampere's instructions, and have neither
    Hopper's nor the B200's. How far their speeds differ was measured (`Gpu.sustained`) or follows
    from their power.
    """
    return FAMILIES.get(family) or _unmeasured(_NEAREST.get(family, AMPERE))


def of_gpu(gpu: Gpu) -> Efficiency:
    """Return the constants of a GPU's architecture, at the clock that its power allows."""
    found = at_its_clock(of_family(gpu.family), gpu)
    measured = gpu.peak(gpu.usual) in MEASURED.get(gpu.family, ())
    return found if measured else _unmeasured(found)


def _unmeasured(found: Efficiency) -> Efficiency:
    unknown = Efficiency()
    return replace(found, interval_low=unknown.interval_low, interval_high=unknown.interval_high)


def at_its_clock(found: Efficiency, gpu: Gpu) -> Efficiency:
    """Return the constants of an architecture at the clock of one of its GPUs.

    Power grows with the clock and the square of the voltage, which grows with the clock: with its
    cube. So a GPU with twice the watts for each TFLOP/s of its peak runs at 2^(1/3) of the clock,
    as a share of its rated one, until matrix products reach `CLOCK`. ``gpu.sustained`` replaces
    this if it is known.
    """
    usual = WATTS.get(gpu.family)
    if not (gpu.watts and usual) or gpu.sustained != 1:
        return found
    faster = (gpu.watts / gpu.peak(gpu.usual) / usual) ** (1 / 3)
    faster = min(faster, CLOCK / found.gemm)
    return replace(found, gemm=faster * found.gemm, attention=faster * found.attention)
