"""What `dtrain plan --probe` has measured on the machines of a cluster. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dtrain.parallelism.cluster.calibration import SCHEMA
from dtrain.parallelism.cluster.efficiency import Efficiency
from dtrain.parallelism.cluster.hardware import CPU, Gpu, Precision
from dtrain.records import dataclass

ALL_REDUCES = {"link": "all-reduce in a host", "network": "all-reduce over all hosts"}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measurement beside the vendor's figure, if there is one."""

    what: str
    value: float
    unit: str
    catalogue: float | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """Measurements of the slowest rank, in the units of `Gpu`."""

    device: str
    """The driver's name of the GPU, or ``cpu``."""
    per_host: int
    """Ranks of a host."""
    memory: float
    products: Mapping[Precision, tuple[tuple[int, float], ...]]
    """Sizes of square matrices, and the TFLOP/s of their product."""
    copy: float
    attention: float
    """TFLOP/s of causal attention's forward pass."""
    collectives: tuple[Mapping[str, Any], ...]
    """Measured collectives, in the form of a calibration file."""
    link: float | None
    """Bus bandwidth of the largest all-reduce in a host; ``network``: over all hosts."""
    network: float | None
    path: str = ""
    """The stored calibration file."""

    @property
    def is_cpu(self) -> bool:
        return self.device == CPU

    def best(self, precision: Precision) -> float:
        """TFLOP/s of the fastest product; 0 if none was measured."""
        return max((speed for _, speed in self.products.get(precision, ())), default=0.0)

    def as_gpu(self) -> Gpu:
        """The CPU's share of a rank as a device. 16 bits count only where they are faster."""
        flops: dict[str, float] = {"fp32": self.best("fp32")}
        if self.best("bf16") > flops["fp32"]:
            flops["bf16"] = self.best("bf16")
        return Gpu(
            name=CPU,
            memory=self.memory,
            bandwidth=self.copy,
            flops=flops,
            link=self.link or self.copy,
            family=CPU,
            source="dtrain plan --probe",
        )

    def calibration(self, gpu: Gpu, base: Efficiency) -> dict[str, Any]:
        """Return the content of a calibration file."""
        # CPUs compute attention in 32 bits, GPUs in 16.
        peak = gpu.peak("fp32" if self.is_cpu else gpu.usual)
        share = min(1.0, self.attention / (peak * gpu.sustained) / base.flash2)
        return {
            "schema": SCHEMA,
            "gemm": [
                {"m": size, "k": size, "n": size, "tflops": speed}
                for size, speed in self.products.get(gpu.usual, ())
            ],
            "collectives": [dict(row) for row in self.collectives],
            "constants": {"attention": share, "stream": min(1.0, self.copy / gpu.bandwidth)},
        }

    def hardware(self, gpu: Gpu) -> dict[str, Any]:
        """Return a table for `hardware` with the measured CPU."""
        kept = ("name", "memory", "bandwidth", "flops", "link", "family", "source")
        values = asdict(gpu)
        return {"gpus": [{name: values[name] for name in kept}]}

    def measurements(self, gpu: Gpu, network: float) -> tuple[Measurement, ...]:
        """Return the measurements beside the figures of the catalogue; of a CPU there are none."""

        def known(value: float) -> float | None:
            return None if self.is_cpu else value

        found = [
            Measurement(
                f"matrix products in {precision}",
                self.best(precision),
                "TFLOP/s",
                known(gpu.flops.get(precision, 0.0)) or None,
            )
            for precision in self.products
        ]
        found.append(Measurement("attention, forward", self.attention, "TFLOP/s"))
        found.append(Measurement("memory bandwidth", self.copy, "GB/s", known(gpu.bandwidth)))
        if self.link is not None:
            ranks = max(row["ranks"] for row in self.collectives if row["hosts"] == 1)
            link = gpu.link_among(ranks)
            found.append(Measurement(ALL_REDUCES["link"], self.link, "GB/s", known(link)))
        if self.network is not None:
            found.append(Measurement(ALL_REDUCES["network"], self.network, "GB/s", known(network)))
        return tuple(found)
