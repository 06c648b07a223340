"""Problems of a host's GPUs, in words and as one letter. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from dtrain.messages.telemetry import HEAT, GpuSample
from dtrain.records import dataclass
from dtrain.wording import counted
from dtrain_cli.views import names

FULL = 0.95
"""A GPU's memory counts as full from this used fraction on."""
IDLE, BUSY = 10, 50
"""Percent: a GPU below the first is idle if half of the job's GPUs are above the second."""


@dataclass(frozen=True, slots=True)
class GpuTrouble:
    mark: str
    """One letter, which a GPU's cell shows."""
    style: str
    what: str
    detail: str = ""
    """About this GPU."""


def trouble(gpu: GpuSample, *, busy: bool) -> GpuTrouble | None:
    """The worst problem of a GPU; None if it has none. ``busy``: whether most GPUs of the job
    work."""
    if gpu.xids:
        errors = counted(gpu.xids, "Xid error")
        return GpuTrouble("X", "white on red", "GPU errors", f"{errors} since the start")
    if gpu.ecc:
        return GpuTrouble(
            "E", "white on red", "uncorrected memory errors", f"{gpu.ecc:,} since the boot"
        )
    if gpu.throttled:
        why = "heat" if (gpu.slowed or 0) & HEAT else "power or hardware"
        parts = [] if gpu.temperature is None else [f"{gpu.temperature:.0f} °C"]
        if gpu.clock is not None and gpu.clock_max:
            parts.append(f"{gpu.clock:,.0f} of {gpu.clock_max:,.0f} MHz")
        return GpuTrouble("T", "black on yellow", f"clock throttled by {why}", ", ".join(parts))
    if gpu.memory is not None and gpu.memory >= FULL:
        used, total = (gpu.memory_used or 0) / 1024, (gpu.memory_total or 0) / 1024
        return GpuTrouble("M", "black on magenta", "memory full", f"{used:.1f} of {total:.1f} GiB")
    if gpu.others:
        taken = f"{(gpu.others_memory or 0) / 1024:.1f} GiB"
        detail = f"{gpu.others} outside the run, {taken}"
        return GpuTrouble("P", "black on magenta", "used by other processes", detail)
    if busy and gpu.use is not None and gpu.use < IDLE:
        return GpuTrouble("I", "black on cyan", "idle")
    return None


def are_busy(gpus: Sequence[GpuSample]) -> bool:
    used = [gpu.use for gpu in gpus if gpu.use is not None]
    return bool(used) and median(used) >= BUSY


def summaries(found: Mapping[str, Mapping[int, GpuTrouble]]) -> list[tuple[str, str]]:
    """A line and its style for each kind of trouble, the worst first. ``found`` is by host and
    GPU."""
    kinds: dict[tuple[str, str], list[tuple[str, int, GpuTrouble]]] = {}
    for host, gpus in found.items():
        for index, one in gpus.items():
            kinds.setdefault((one.mark, one.what), []).append((host, index, one))
    lines = []
    for (_, what), cases in sorted(kinds.items(), key=lambda kind: "XETMPI".index(kind[0][0])):
        hosts = list(dict.fromkeys(host for host, _, _ in cases))
        host, index, first = cases[0]
        if len(cases) == 1:
            detail = f" ({first.detail})" if first.detail else ""
            text = f"{host} GPU {index}: {what}{detail}"
        elif len(hosts) == 1:
            which = names.labels(str(index) for _, index, _ in cases)
            text = f"{host} GPUs {which}: {what}"
        else:
            text = f"{len(cases)} GPUs on {names.brief(hosts)}: {what}"
        lines.append((text, first.style))
    return lines
