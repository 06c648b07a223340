"""A host's telemetry. Pure.

`dtrain.node.telemetry` documents it.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated, Any

from dtrain.messages.agent import Time
from dtrain.messages.decode import AsList, Length, Range, decode
from dtrain.records import dataclass

# What a tool or a kernel says is of no use sometimes, such as 2**32 - 1. It costs no sample.
_Bytes = Annotated[int, Range(0, (1 << 64) - 1)]
_Rate = Annotated[float, Range(0, 1e15)]
_Amount = Annotated[float, Range(0, 1e15)]
_Count = Annotated[int, Range(0, (1 << 64) - 1)]

MIB = 1 << 20
HEAT = 0x20 | 0x40
HARDWARE = 0x08 | 0x80
"""NVML's bits of reasons for a slow clock: heat, and power or other hardware. Others, such as a
power limit in software, are normal under load."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    index: Annotated[int, Range(0, 4096)]
    use: _Amount | None
    """Percent."""
    memory_used: _Amount | None
    """MiB."""
    memory_total: _Amount | None
    power: _Amount | None
    """W."""
    power_limit: _Amount | None
    temperature: _Amount | None
    """Degrees Celsius."""
    clock: _Amount | None
    """MHz."""
    clock_max: _Amount | None
    slowed: _Count | None
    """NVML's bits of reasons for a slow clock."""
    ecc: _Count | None
    """Uncorrected errors since the boot."""
    xids: _Count | None
    """Xid errors since the run started."""
    memory_use: _Amount | None = None
    """Percent of the time in which its memory was read or written."""
    memory_clock: _Amount | None = None
    """MHz."""
    ecc_corrected: _Count | None = None
    """Corrected errors since the boot."""
    others: _Count | None = None
    """Processes outside the run that use it."""
    others_memory: _Amount | None = None
    """MiB that these have."""

    @property
    def memory(self) -> float | None:
        """The used part of the memory, from 0 to 1."""
        if self.memory_used is None or not self.memory_total:
            return None
        return min(1.0, self.memory_used / self.memory_total)

    @property
    def throttled(self) -> bool:
        """Whether heat, power or the hardware slows its clock down."""
        return bool((self.slowed or 0) & (HEAT | HARDWARE))


@dataclass(frozen=True, slots=True)
class RankUse:
    """What one rank and its child processes use."""

    process: Annotated[str, Length(64)]
    """``rank-3``, or a TensorFlow task such as ``chief-0``."""
    cpu: _Amount | None
    """Busy CPUs."""
    memory: _Bytes
    files: _Count
    """Open files."""


_Pair = tuple[_Rate, _Rate]
"""Bytes per second: read or received, and written or sent."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A host at one time, or its averages of 10 s."""

    time: Time
    """Seconds since the epoch, on the host's clock."""
    cpus: _Count | None
    cpu: _Amount | None
    """Busy CPUs."""
    memory: tuple[_Bytes, _Bytes] | None
    """Bytes used, and in total."""
    disk: _Pair | None
    network: _Pair | None
    infiniband: _Pair | None
    gpus: Annotated[tuple[Annotated[GpuSample, AsList], ...], Length(64)]
    ranks: Annotated[tuple[Annotated[RankUse, AsList], ...], Length(1024)]
    storage: tuple[_Bytes, _Bytes] | None = None
    """Bytes used and in total, of the disk with the run's folder."""
    losses: _Rate | None = None
    """Packets per second that the network lost."""
    round_trip: _Amount | None = None
    """Milliseconds of the fastest connection of a rank with another host."""

    @classmethod
    def read(cls, body: Any) -> Sample:
        """A sample from a host or a file, neither of which is trusted. Raises ProtocolError."""
        sample = decode(cls, body, "sample")
        # Each once: what reads the exported metrics refuses two values of one GPU.
        gpus = {gpu.index: gpu for gpu in sample.gpus}
        ranks = {rank.process: rank for rank in sample.ranks}
        return replace(sample, gpus=tuple(gpus.values()), ranks=tuple(ranks.values()))

    def as_json(self) -> dict[str, Any]:
        """The argument of `read`."""
        body = {one.name: getattr(self, one.name) for one in fields(self)}
        for name in ("gpus", "ranks"):
            body[name] = [
                [getattr(row, one.name) for one in fields(row)] for row in getattr(self, name)
            ]
        return body
