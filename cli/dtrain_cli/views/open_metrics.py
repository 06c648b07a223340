"""A run in the OpenMetrics text format, which Prometheus and node_exporter read. Pure.

All values are gauges: node_exporter's textfile collector knows no other type that fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import field

from dtrain.messages.telemetry import MIB, Sample
from dtrain.records import dataclass
from dtrain.runs.goodput import Goodput
from dtrain.runs.observed import ObservedAttempt, ObservedRun
from dtrain.runs.progress import Progress

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@dataclass(slots=True)
class Metrics:
    """What is known of a run."""

    run: str = ""
    known: ObservedRun = field(default_factory=ObservedRun)
    progress: dict[str, Progress] = field(default_factory=dict)
    """By process: ``rank-0``, or a task such as ``chief-0``."""
    tokens_per_second: float | None = None
    """Of all ranks together."""
    samples: dict[str, Sample] = field(default_factory=dict)
    """The latest of each host."""
    goodput: Goodput | None = None

    @property
    def attempt(self) -> ObservedAttempt:
        return self.known.attempt


_Value = tuple[Mapping[str, str], float | None]
_HELP = {
    "attempt": "Number of the attempt.",
    "host_state": "1 for the present state of a host.",
    "step": "Steps that a rank has done.",
    "steps_planned": "Steps of the whole job.",
    "loss": "Loss that a rank reports.",
    "tokens": "Tokens of the job so far.",
    "tokens_per_second": "Tokens per second of all ranks together.",
    "metric": "Other values that a rank reports.",
    "goodput_ratio": "Share of the time in steps that count, from 0 to 1.",
    "time_seconds": "Where the time since the start went.",
    "slow_rank": "1 for a rank that is slower than the others.",
    "standing_rank": "1 for a rank that stands still while the others wait.",
    "cpus": "CPUs of a host.",
    "cpus_busy": "Busy CPUs of a host.",
    "memory_used_bytes": "Used memory of a host.",
    "memory_size_bytes": "Memory of a host.",
    "disk_read_bytes_per_second": "Bytes read from disks.",
    "disk_written_bytes_per_second": "Bytes written to disks.",
    "network_received_bytes_per_second": "Bytes received, without InfiniBand.",
    "network_sent_bytes_per_second": "Bytes sent, without InfiniBand.",
    "infiniband_received_bytes_per_second": "Bytes received over InfiniBand.",
    "infiniband_sent_bytes_per_second": "Bytes sent over InfiniBand.",
    "storage_used_bytes": "Used space of the disk with the run's folder.",
    "storage_size_bytes": "Size of the disk with the run's folder.",
    "lost_packets_per_second": "Packets that the network of a host lost.",
    "round_trip_seconds": "Round trip of the fastest TCP connection of a rank.",
    "gpu_use_ratio": "Part of the time in which a GPU was busy, from 0 to 1.",
    "gpu_memory_used_bytes": "Used memory of a GPU.",
    "gpu_memory_size_bytes": "Memory of a GPU.",
    "gpu_memory_use_ratio": "Part of the time in which memory of a GPU was read or written.",
    "gpu_power_watts": "Power of a GPU.",
    "gpu_power_limit_watts": "Most power that a GPU may take.",
    "gpu_temperature_celsius": "Temperature of a GPU.",
    "gpu_clock_hertz": "Clock of a GPU's processors.",
    "gpu_clock_limit_hertz": "Highest clock of a GPU's processors.",
    "gpu_memory_clock_hertz": "Clock of a GPU's memory.",
    "gpu_throttle_reasons": "Reasons for a slow clock, as the bits that NVML defines.",
    "gpu_xid_errors": "Xid errors of a GPU since the start of the run.",
    "gpu_memory_errors": "Uncorrected memory errors of a GPU since the boot.",
    "gpu_corrected_memory_errors": "Corrected memory errors of a GPU since the boot.",
    "gpu_other_processes": "Processes outside the run that use a GPU.",
    "rank_cpus_busy": "Busy CPUs of a rank with its child processes.",
    "rank_memory_bytes": "Resident memory of a rank with its child processes.",
    "rank_open_files": "Open files of a rank with its child processes.",
}


def text(found: Metrics) -> str:
    """Return the metrics, each with a label ``run``."""
    families: dict[str, list[_Value]] = {name: [] for name in _HELP}
    for name, labels, value in (*_job(found), *_hosts(found)):
        families[name].append((labels, value))
    lines: list[str] = []
    for name, values in families.items():
        known = [(labels, value) for labels, value in values if value is not None]
        if not known:
            continue
        lines += [f"# HELP dtrain_{name} {_HELP[name]}", f"# TYPE dtrain_{name} gauge"]
        for own, value in known:
            every = {"run": found.run, **own}
            inside = ",".join(f'{key}="{_escaped(label)}"' for key, label in every.items())
            lines.append(f"dtrain_{name}{{{inside}}} {_number(value)}")
    return "\n".join([*lines, "# EOF", ""])


_Row = tuple[str, dict[str, str], float | None]


def _job(found: Metrics) -> Iterator[_Row]:
    yield "attempt", {}, float(found.attempt.number)
    yield "tokens_per_second", {}, found.tokens_per_second
    for host, (_, now) in found.attempt.hosts.items():
        yield "host_state", {"host": host, "state": str(now.state)}, 1.0
    for process, report in found.progress.items():
        of = {"rank": _rank(process)}
        yield "step", of, report.step
        yield "steps_planned", of, report.total
        yield "loss", of, report.loss
        yield "tokens", of, report.tokens
        for name, value in report.metrics.items():
            yield "metric", {**of, "name": name}, value
    if (slow := found.attempt.slow) is not None:
        for process in slow.processes:
            yield "slow_rank", {"rank": _rank(process), "cause": slow.cause}, 1.0
    if (stall := found.attempt.stall) is not None:
        for process in stall.processes:
            yield "standing_rank", {"rank": _rank(process)}, 1.0
    if found.goodput is not None:
        yield "goodput_ratio", {}, found.goodput.share
        for name, spent in found.goodput.seconds.items():
            yield "time_seconds", {"class": name}, spent


def _hosts(found: Metrics) -> Iterator[_Row]:
    for host, sample in found.samples.items():
        of = {"host": host}
        yield "cpus", of, sample.cpus
        yield "cpus_busy", of, sample.cpu
        pairs = {
            ("memory_used_bytes", "memory_size_bytes"): sample.memory,
            ("disk_read_bytes_per_second", "disk_written_bytes_per_second"): sample.disk,
            ("storage_used_bytes", "storage_size_bytes"): sample.storage,
        }
        for kind, rates in (("network", sample.network), ("infiniband", sample.infiniband)):
            pairs[f"{kind}_received_bytes_per_second", f"{kind}_sent_bytes_per_second"] = rates
        for both, values in pairs.items():
            for name, value in zip(both, values or (None, None), strict=True):
                yield name, of, value
        yield "lost_packets_per_second", of, sample.losses
        yield "round_trip_seconds", of, _scaled(sample.round_trip, 1e-3)
        for gpu in sample.gpus:
            each = {**of, "gpu": str(gpu.index)}
            yield "gpu_use_ratio", each, _scaled(gpu.use, 0.01)
            yield "gpu_memory_used_bytes", each, _scaled(gpu.memory_used, MIB)
            yield "gpu_memory_size_bytes", each, _scaled(gpu.memory_total, MIB)
            yield "gpu_memory_use_ratio", each, _scaled(gpu.memory_use, 0.01)
            yield "gpu_power_watts", each, gpu.power
            yield "gpu_power_limit_watts", each, gpu.power_limit
            yield "gpu_temperature_celsius", each, gpu.temperature
            yield "gpu_clock_hertz", each, _scaled(gpu.clock, 1e6)
            yield "gpu_clock_limit_hertz", each, _scaled(gpu.clock_max, 1e6)
            yield "gpu_memory_clock_hertz", each, _scaled(gpu.memory_clock, 1e6)
            yield "gpu_throttle_reasons", each, gpu.slowed
            yield "gpu_xid_errors", each, gpu.xids
            yield "gpu_memory_errors", each, gpu.ecc
            yield "gpu_corrected_memory_errors", each, gpu.ecc_corrected
            yield "gpu_other_processes", each, gpu.others
        for rank in sample.ranks:
            each = {**of, "rank": _rank(rank.process)}
            yield "rank_cpus_busy", each, rank.cpu
            yield "rank_memory_bytes", each, rank.memory
            yield "rank_open_files", each, rank.files


def _rank(process: str) -> str:
    return process.removeprefix("rank-")


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escaped(label: str) -> str:
    plain = label.encode(errors="replace").decode()
    return plain.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
