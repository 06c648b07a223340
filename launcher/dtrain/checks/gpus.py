"""Checks that GPUs exist, are healthy, of the same model, and free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from types import MappingProxyType

from dtrain.checks.evidence import Evidence, Facts, HostFacts
from dtrain.checks.finding import HOSTS, Finding, warning
from dtrain.checks.sizes import GIB, in_words
from dtrain.checks.skew import outliers
from dtrain.diagnostics import UsageError
from dtrain.launchplan.names import fold_numbers
from dtrain.launchplan.plan import LaunchPlan
from dtrain.wording import counted

_SLOWDOWNS = {
    "hw_slowdown": "its hardware has slowed it down",
    "hw_thermal_slowdown": "it is too hot",
    "sw_thermal_slowdown": "it is too hot",
    "hw_power_brake_slowdown": "its power supply limits it",
}
_FATAL_XIDS = {
    48: "double-bit memory error",
    64: "memory rows could not be remapped",
    79: "the GPU has fallen off the bus",
    95: "uncontained memory error",
}
_BAD_XIDS = {63: "memory rows were remapped", 74: "NVLink error", 94: "contained memory error"}
_KEY = f"cluster.overrides.{HOSTS}.gpus"
DESKTOP = 3 * GIB // 2
"""Bytes of GPU memory that a desktop may use."""
_Judged = Callable[[str, str, str, str], Finding]
"""`HostFacts.error` or `HostFacts.warning`."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.hosts:
        if not host.part.host.gpus:
            continue
        found = host.facts.get("gpus")
        if found is None:
            yield from _counted(host)
            continue
        yield from _there(host, found)
        for gpu in _used(host):
            yield from _health(host, gpu)
            yield from _free(host, gpu)
        yield from _xids(host)
    yield from _differences(evidence)


def unknown(plan: LaunchPlan) -> Iterator[Finding]:
    """Names in the cluster file that the planner does not know. They do not affect the launch."""
    hosts: dict[str, list[str]] = {}
    for part in plan.hosts:
        if part.host.gpu is not None:
            hosts.setdefault(part.host.gpu, []).append(part.host.name)
    if not hosts:
        return
    # Most files name no GPU, and need no table.
    from dtrain.parallelism.cluster.hardware_table import hardware
    from dtrain.parallelism.names import nearest

    for name, of in hosts.items():
        try:
            hardware().gpu(name)
        except UsageError as error:
            near = "".join(
                f"did you mean {one}? "
                for one in nearest(name, [gpu.name for gpu in hardware().gpus])
            )
            yield warning(
                "gpu",
                of,
                error.message,
                "a GPU of the planner's table, or of yours (`dtrain plan --hardware`)",
                f"{near}`dtrain help models` lists those of the table",
            )


def _used(host: HostFacts) -> list[Facts]:
    """The GPUs that the job uses on the host."""
    return [gpu for gpu in host.fact("gpus").get("gpus", ()) if gpu["index"] in host.part.host.gpus]


def _counted(host: HostFacts) -> Iterator[Finding]:
    """What a launch knows: the number of GPUs, from files of the kernel. No errors: a driver may
    make these files only when a program uses it, and in a job for CPUs, ``gpus`` may be a number of
    workers."""
    found = host.fact("machine")
    if count := len(found.get("gpu_nodes", ())):
        yield from _missing(host, range(count), host.warning)
    elif found.get("accelerators") is False:
        yield _none(host, host.warning)


def _there(host: HostFacts, found: Facts) -> Iterator[Finding]:
    if "error" in found:
        if found.get("tool"):
            yield host.error(
                "gpu",
                f"{found['tool']} fails: {found['error']}",
                _expected(host),
                _driver_remedy(found["error"]),
            )
        return
    if "gpus" not in found:
        sees = host.fact("interpreter").get("framework", {}).get("gpus", 0)
        if sees >= len(host.part.host.gpus) or host.fact("granted"):
            return  # There is no tool, but the framework can use the GPUs, or Slurm gives them.
        yield _none(host, host.error, found.get("pci", {}))
        return
    yield from _missing(host, {gpu["index"] for gpu in found["gpus"]}, host.error)


def _none(host: HostFacts, judged: _Judged, pci: Facts = MappingProxyType({})) -> Finding:
    """The finding about a host without usable GPUs. ``pci``: those on its bus, by vendor."""
    listed = ", ".join(f"{count} of {vendor}" for vendor, count in pci.items())
    seen = f"no driver for its GPUs ({listed})" if listed else "no GPU found"
    remedy = "install the GPU driver" if listed else f"set {_KEY}: 0, or remove the host"
    if host.fact("machine").get("container"):
        remedy = "start the container with its GPUs (docker run --gpus all)"
    return judged("gpu", seen, _expected(host), remedy)


def _missing(host: HostFacts, there: Collection[int], judged: _Judged) -> Iterator[Finding]:
    if missing := [index for index in host.part.host.gpus if index not in there]:
        yield judged(
            "gpu",
            f"{counted(len(there), 'GPU')} found; GPU {fold_numbers(missing)} is missing",
            _expected(host),
            f"set {_KEY}: {len(there)}, or look for lost GPUs: `dmesg | grep -i -e xid -e amdgpu`",
        )


def _expected(host: HostFacts) -> str:
    return f"GPUs {fold_numbers(host.part.host.gpus)}, as set in the cluster file"


def _driver_remedy(output: str) -> str:
    if "mismatch" in output.lower():
        return "restart the host: the driver was upgraded while it was loaded"
    return "load or install the GPU driver there (sudo modprobe nvidia), or restart the host"


def _health(host: HostFacts, gpu: Facts) -> Iterator[Finding]:
    index = gpu["index"]
    reset = f"sudo nvidia-smi --gpu-reset -i {index} there, or restart the host"
    if gpu.get("mig") == "Enabled":
        yield host.error(
            "gpu",
            f"GPU {index} is split into MIG instances",
            "whole GPUs: NCCL does not work between MIG instances",
            f"sudo nvidia-smi -i {index} -mig 0 there, or remove it from the host's gpus",
        )
    if gpu.get("compute_mode") == "Prohibited":
        yield host.error(
            "gpu",
            f"GPU {index} is in compute mode Prohibited",
            "compute mode Default",
            f"sudo nvidia-smi -i {index} -c DEFAULT there",
        )
    if gpu.get("remap_failed") == "Yes":
        yield host.error(
            "gpu",
            f"GPU {index} failed to remap bad memory rows",
            "healthy memory",
            "replace the GPU, and remove it from the host's gpus until then",
        )
    elif gpu.get("uncorrected"):
        yield host.error(
            "gpu",
            f"GPU {index} has had {counted(gpu['uncorrected'], 'uncorrectable memory error')}"
            " since the driver was loaded",
            "none",
            f"{reset}; replace the GPU if the errors come back",
        )
    elif gpu.get("remap_pending") == "Yes":
        yield host.warning(
            "gpu", f"GPU {index} needs a reset to retire failing memory", "no repair pending", reset
        )
    reasons = dict.fromkeys(_SLOWDOWNS[one] for one in gpu["slowed"] if one in _SLOWDOWNS)
    if reasons:
        heat = f" ({gpu['temperature']} °C)" if gpu.get("temperature") else ""
        yield host.warning(
            "gpu",
            f"GPU {index} runs below its clocks: {', '.join(reasons)}{heat}",
            "full clocks",
            "check its cooling and power: `nvidia-smi -q -d PERFORMANCE,TEMPERATURE`",
        )


def _free(host: HostFacts, gpu: Facts) -> Iterator[Finding]:
    used, memory = gpu.get("used") or 0, gpu.get("memory") or 0
    if used <= DESKTOP:
        return
    holders = [
        f"{one['pid']} ({one['name']}{', ' + one['user'] if one['user'] else ''})"
        for one in gpu["processes"]
    ]
    by = f" by process {', '.join(holders[:4])}" if holders else ""
    kill = " ".join(str(one["pid"]) for one in gpu["processes"][:4])
    judged = host.error if memory and used > memory / 2 else host.warning
    yield judged(
        "gpu",
        f"{in_words(used)} of the {in_words(memory)} of GPU {gpu['index']} are in use{by}",
        "free memory",
        f"if the process is not needed, run there: kill {kill}"
        if kill
        else _find_users(host, gpu["index"]),
    )


def _find_users(host: HostFacts, index: int) -> str:
    if host.fact("gpus").get("tool") == "rocm-smi":
        return "list its processes with `rocm-smi --showpids`, also in containers"
    return f"list its processes with `sudo fuser -v /dev/nvidia{index}`, also in containers"


def _xids(host: HostFacts) -> Iterator[Finding]:
    found = host.fact("gpus").get("xids", {})
    if "error" in found:
        return
    for key, count in found.items():
        place, _, code = key.partition(" ")
        number = int(code)
        if number not in _FATAL_XIDS and number not in _BAD_XIDS:
            continue
        owners = [gpu for gpu in host.fact("gpus").get("gpus", ()) if _is_at(gpu, place)]
        if owners and not any(gpu["index"] in host.part.host.gpus for gpu in owners):
            continue  # The job does not use this GPU.
        meaning = _FATAL_XIDS.get(number) or _BAD_XIDS[number]
        # Later repairs do not appear in the log, but a GPU that is off the bus stays off. If the
        # GPU is unknown, it may be one that the job does not use.
        judged = host.error if number == 79 and owners else host.warning
        yield judged(
            "gpu",
            f"the driver has reported Xid {number} ({meaning}) {counted(count, 'time')} for the"
            f" GPU at {place} since the host started",
            "no such reports",
            "restart the host; if the reports come back, have the GPU inspected",
        )


def _is_at(gpu: Facts, place: str) -> bool:
    """Whether the GPU is at this PCI address. The driver prints a shorter form than the tool."""
    return place.lower() in (gpu.get("bus") or "").lower()


def _differences(evidence: Evidence) -> Iterator[Finding]:
    models: dict[str, str] = {}
    drivers: dict[str, str] = {}
    for host in evidence.hosts:
        used = _used(host)
        if not used:
            continue
        kinds = Counter(
            f"{gpu['name']} with {in_words(gpu['memory'])}" if gpu["memory"] else str(gpu["name"])
            for gpu in used
        )
        models[host.name] = " and ".join(sorted(kinds))
        if driver := host.fact("gpus").get("driver"):
            drivers[host.name] = f"driver {driver}"
        if len(kinds) > 1:
            yield host.warning(
                "gpu",
                f"its GPUs are of {len(kinds)} models: {', '.join(sorted(kinds))}",
                "one model: the slowest and smallest GPU limits the job",
                f"choose GPUs of one model with cluster.overrides.{HOSTS}.gpus",
            )
        yield from _narrow(host, used)
    for outlier in outliers(models):
        yield outlier.warning(
            "gpu",
            "the same GPUs on all hosts: the slowest and smallest limits the job",
            f"{evidence.remove}, or choose batch sizes for the smallest GPU",
        )
    for outlier in outliers(drivers):
        yield outlier.warning(
            "driver", "the same driver on all hosts", f"install {outlier.usual} there"
        )


def _narrow(host: HostFacts, used: list[Facts]) -> Iterator[Finding]:
    """A GPU whose link to the host is narrower than its neighbors'."""
    widths: dict[int, int] = {
        gpu["index"]: gpu["link_width"] for gpu in used if gpu.get("link_width")
    }
    widest = max(widths.values(), default=0)
    narrow = [index for index, width in widths.items() if width < widest]
    if narrow:
        yield host.warning(
            "gpu",
            f"GPU {fold_numbers(narrow)} uses {widths[narrow[0]]} PCIe lanes, other GPUs {widest}",
            "the same width for all GPUs",
            "reseat that GPU or its riser, and check the slot's settings in the firmware",
        )
