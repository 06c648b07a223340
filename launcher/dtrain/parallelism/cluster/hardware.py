"""The planner's model of GPUs and the links between them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field, replace
from typing import Literal

from dtrain.diagnostics import UsageError
from dtrain.records import KeepsHash, cached_property, dataclass
from dtrain.wording import counted, either

Precision = Literal["bf16", "fp16", "fp8", "nvfp4", "tf32", "fp32"]

PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "fp8", "nvfp4", "tf32", "fp32")

GIB = 2.0**30

CPU = "cpu"
"""The name and the architecture of a share of a host's CPUs."""

_MAKERS = {"cdna": "AMD", "tpu": "Google", "gaudi": "Intel", "trainium": "AWS"}
"""By architecture; NVIDIA's are all others."""

USUAL_HOST = 512.0
"""GiB of a host's memory, if nothing says how much it has: an assumption."""

MAX_GPUS = 1_000_000
"""Upper limit; no cluster has more, and larger searches are slow."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator.

    Speeds are vendors' figures for dense arithmetic: ``flops`` in TFLOP/s, bandwidths in GB/s
    (10⁹ bytes). ``memory`` is in GiB, as the driver reports it.
    """

    name: str
    memory: float
    bandwidth: float
    """Bandwidth of its memory."""
    flops: dict[str, float] = field(hash=False)
    """By precision, of those in ``PRECISIONS``; ``tf32`` where it has that."""
    link: float
    """Bandwidth to the other GPUs of its host, one way: NVLink, or PCIe without NVLink."""
    family: str = ""
    """Architecture, such as ``ampere``, which determines the efficiencies."""
    source: str = ""
    machine: str = "server"
    """Name of the machine that usually contains it."""
    domain: int = 0
    """Number of GPUs that ``link`` joins if they span several hosts (NVL72); else 0."""
    mesh: int = 0
    """Number of GPUs of a host if each pair has its own part of ``link``, and no switch; else 0."""
    shares_memory: bool = False
    """Whether the host's processors have no memory beside its own, as in an MI300A."""
    custom: bool = False
    """Whether it was made for one supercomputer, so that nobody else can get it."""
    sustained: float = 1.0
    """Speed of its matrix products in shares of the peak, relative to the GPU that its efficiencies
    were fitted on, if ``source`` says why it differs. Otherwise that follows from ``watts``."""
    watts: float = 0.0
    """Rated power of the board; 0 if it is not published."""
    aliases: tuple[str, ...] = ()

    @property
    def is_cpu(self) -> bool:
        """Whether it is the share of a host's CPUs that one process has. Its figures are measured:
        there are no others, and so no MFU."""
        return self.family == CPU

    @property
    def has_host(self) -> bool:
        """Whether its host has a memory of its own, to which states can be offloaded."""
        return not (self.is_cpu or self.shares_memory)

    @property
    def maker(self) -> str:
        """Devices of different makers cannot communicate in one job."""
        return _MAKERS.get(self.family, "NVIDIA")

    @property
    def unit(self) -> str:
        """What a rank of a layout is called."""
        if self.is_cpu:
            return "process"
        return "GPU" if self.maker in ("NVIDIA", "AMD") else "chip"

    def peak(self, precision: Precision) -> float:
        """TFLOP/s of dense matrix multiplication.

        Raises:
            UsageError: this GPU has no such arithmetic.
        """
        if precision in self.flops:
            return self.flops[precision]
        raise UsageError(
            f"{self.name} does not support {precision}",
            hint=f"use `precision` {either(self.flops)}",
        )

    def link_among(self, members: int) -> float:
        """GB/s of each of ``members`` in one host to the others of them, all together."""
        if members < 2 or members >= self.mesh:
            return self.link
        return self.link * (members - 1) / (self.mesh - 1)

    @property
    def usual(self) -> Precision:
        """The precision of measured speeds: 16 bits, or 32 on a device without."""
        known: tuple[Precision, ...] = ("bf16", "fp16", "fp32", *PRECISIONS)
        return next(precision for precision in known if precision in self.flops)


def slowest(kinds: Collection[Gpu]) -> Gpu:
    """Return a GPU that stands for all ``kinds`` in one job, in which each step waits for the
    slowest: the kind with the least sustained 16-bit FLOP/s, with the least memory and bandwidth
    of all.

    Raises:
        UsageError: they have no precision in common.
    """
    slow = min(kinds, key=lambda gpu: gpu.flops[gpu.usual] * gpu.sustained)
    flops = {
        precision: min(gpu.flops[precision] * (gpu.sustained / slow.sustained) for gpu in kinds)
        for precision in slow.flops
        if all(precision in gpu.flops for gpu in kinds)
    }
    if not flops:
        raise UsageError(
            f"{' and '.join(gpu.name for gpu in kinds)} have no precision in common",
            hint="list only hosts with the same kind of GPU",
        )
    return replace(
        slow,
        memory=min(gpu.memory for gpu in kinds),
        bandwidth=min(gpu.bandwidth for gpu in kinds),
        link=min(gpu.link for gpu in kinds),
        flops=flops,
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """A kind of host."""

    name: str
    gpu: str
    gpus_per_host: int
    network_gbps: float
    """Of one host to the others, all NICs together, one way, in Gb/s as vendors print it."""
    memory: float = USUAL_HOST
    """GiB of the host beside that of its GPUs."""
    source: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def network(self) -> float:
        """``network_gbps`` in GB/s."""
        return self.network_gbps / 8


@dataclass(frozen=True, slots=True)
class GpuCluster(KeepsHash):
    """``gpus`` equal GPUs in hosts of ``gpus_per_host``."""

    gpu: Gpu
    gpus: int
    gpus_per_host: int
    network: float
    """Of one host to the others, all NICs together, one way, in GB/s."""
    host_memory: float = USUAL_HOST
    """As `Machine.memory`."""
    rack_hosts: int = 0
    """Hosts of one rack, if the network between racks is slower; else 0."""
    between_racks: float = 0.0
    """As ``network``, to hosts of other racks while all hosts of a rack send there."""

    @property
    def devices(self) -> str:
        """``16 GPUs``, or ``4 processes`` on CPUs."""
        return counted(self.gpus, self.gpu.unit)

    @property
    def hosts(self) -> int:
        return -(-self.gpus // self.gpus_per_host)

    @cached_property
    def joined(self) -> int:
        """Number of GPUs that the link joins: those of a host, or what a job uses of a rack.

        Schedulers give a job equal parts of racks: 256 GPUs use 64 of the 72 in each NVL72.
        """
        whole = range(self.gpu.domain, self.gpus_per_host, -self.gpus_per_host)
        return next(
            (part for part in whole if self.gpus % part == 0), min(self.gpus_per_host, self.gpus)
        )
