"""Facts about the machine: system, processors, memory, and processes left by earlier runs."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys

from dtrain.node.files import listed, numbered, text_of, user_name
from dtrain.node.numa import gpu_nodes, node_cpus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.facts.files import Json
    from dtrain.node.facts.orders import GatherOrder


MOST_RUNS = 16
DEVICES = (
    *("nvidia", "nvhost", "nvmap", "dxg", "kfd", "accel", "neuron", "davinci", "dri/renderD"),
    *("%s%d" % (name, number) for name in ("hl", "vfio/") for number in range(10)),
)
"""How the names of accelerators in /dev begin. To compile a pattern would take longer than the
search."""


def machine(_request: GatherOrder) -> Json:
    release = os.uname()
    return {
        "hostname": socket.gethostname(),
        "boot": text_of("/proc/sys/kernel/random/boot_id"),
        "network": os.stat("/proc/self/ns/net").st_ino,
        "kernel": release.release,
        "architecture": release.machine,
        "system": system_name(),
        "libc": libc(),
        "container": container(),
        "user": user_name(os.geteuid()),
        "home": os.path.expanduser("~"),
        "python": "%d.%d.%d" % sys.version_info[:3],
        "cpus": len(os.sched_getaffinity(0)),
        "numa_nodes": len(numbered("/sys/devices/system/node", "node")),
        "gpu_nodes": gpu_nodes(),
        "accelerators": accelerators(),
        "node_cpus": {
            str(node): len(cpus & os.sched_getaffinity(0)) for node, cpus in node_cpus().items()
        },
        "governors": governors(),
        "runs": supervised_runs(),
    }


def system_name() -> str:
    lines = (text_of("/etc/os-release") or "").splitlines()
    named = (line.partition("=")[2] for line in lines if line.startswith("PRETTY_NAME="))
    return next(named, "").strip('"')


def libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):  # musl has no such name
        return ""


def container() -> str:
    if os.path.exists("/run/.containerenv"):
        return "podman"
    if os.path.exists("/.dockerenv"):
        return "docker"
    cgroup = text_of("/proc/1/cgroup") or ""
    return next(
        (name for name in ("kubepods", "docker", "lxc", "containerd") if name in cgroup), ""
    )


def governors() -> dict[str, int]:
    """The number of CPUs by frequency governor."""
    found: dict[str, int] = {}
    base = "/sys/devices/system/cpu"
    for cpu in numbered(base, "cpu"):
        governor = text_of("%s/cpu%d/cpufreq/scaling_governor" % (base, cpu))
        if governor:
            found[governor] = found.get(governor, 0) + 1
    return found


def accelerators(root: str = "") -> bool:
    """Whether the kernel has a device file or a driver of a GPU, TPU or other accelerator. A driver
    may make its files only when a program uses it."""
    names = [
        folder + name
        for folder in ("", "dri/", "vfio/")
        for name in listed("%s/dev/%s" % (root, folder))
    ]
    driver = os.path.exists(root + "/proc/driver/nvidia")
    return driver or any(name.startswith(DEVICES) for name in names)


def memory(_request: GatherOrder) -> Json:
    """The memory in bytes. ``limit`` is that of a cgroup, if it is below the machine's memory."""
    with open("/proc/meminfo") as file:
        rows = dict(re.findall(r"(?m)^(\w+):\s+(\d+)", file.read()))
    # Old kernels have no MemAvailable.
    available = rows.get("MemAvailable") or rows["MemFree"]
    found = {"total": int(rows["MemTotal"]) << 10, "available": int(available) << 10}
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = text_of(path)
        if limit and limit.isdecimal() and int(limit) < found["total"]:
            found["limit"] = int(limit)
    return found


def supervised_runs() -> list[str]:
    """The runs of all users that have a supervisor here, from the names of the supervisors' sockets
    (`dtrain.node.agent.control`)."""
    sockets = text_of("/proc/net/unix") or ""
    if " @dtrain/" not in sockets:
        return []
    names = re.findall(r" @dtrain/([^/\s]{1,80})/[^/\s]*/[0-9a-f]{8}$", sockets, re.MULTILINE)
    return sorted(set(names))[:MOST_RUNS]


def leftovers(_request: GatherOrder) -> Json:
    """The process ids of this user's earlier runs, by run id."""
    runs: dict[str, list[int]] = {}
    for name in listed("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if os.stat("/proc/" + name).st_uid != os.geteuid():
                continue
            with open("/proc/%s/environ" % name, "rb") as file:
                found = re.search(rb"(?:^|\0)DTRAIN_RUN_ID=([^\0]{1,200})", file.read(1 << 20))
            if found:
                runs.setdefault(found[1].decode("utf-8", "backslashreplace"), []).append(int(name))
    return runs
