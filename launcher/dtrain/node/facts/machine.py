"""Facts about the machine: system, processors, memory, and processes left by earlier runs."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys

from dtrain.node.files import listed, text_of, user_name
from dtrain.node.numa import gpu_nodes, node_cpus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.facts.files import Json
    from dtrain.node.facts.orders import GatherOrder


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
        "wsl": "microsoft" in release.release.lower(),
        "user": user_name(os.geteuid()),
        "home": os.path.expanduser("~"),
        "locale": next(
            (os.environ[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(name)),
            "",
        ),
        "python": "%d.%d.%d" % sys.version_info[:3],
        "cpus": len(os.sched_getaffinity(0)),
        "numa_nodes": sum(
            bool(re.fullmatch(r"node\d+", name)) for name in listed("/sys/devices/system/node")
        ),
        "gpu_nodes": gpu_nodes(),
        "node_cpus": {
            str(node): len(cpus & os.sched_getaffinity(0)) for node, cpus in node_cpus().items()
        },
        "governors": governors(),
        "frequency_driver": text_of("/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver"),
    }


def system_name() -> str:
    found = re.search(r'(?m)^PRETTY_NAME="?(.*?)"?$', text_of("/etc/os-release") or "")
    return found[1] if found else ""


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
    found = re.search(r"(docker|kubepods|lxc|containerd)", text_of("/proc/1/cgroup") or "")
    return found[1] if found else ""


def governors() -> dict[str, int]:
    """The number of CPUs by frequency governor."""
    found: dict[str, int] = {}
    base = "/sys/devices/system/cpu"
    for name in listed(base):
        if re.fullmatch(r"cpu\d+", name):
            governor = text_of("%s/%s/cpufreq/scaling_governor" % (base, name))
            if governor:
                found[governor] = found.get(governor, 0) + 1
    return found


def memory(_request: GatherOrder) -> Json:
    """The memory in bytes. ``limit`` is that of a cgroup, if it is below the machine's memory."""
    rows = dict(re.findall(r"(?m)^(\w+):\s+(\d+)", text_of("/proc/meminfo") or ""))
    found = {"total": int(rows["MemTotal"]) << 10, "available": int(rows["MemAvailable"]) << 10}
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = text_of(path)
        if limit and limit.isdecimal() and int(limit) < found["total"]:
            found["limit"] = int(limit)
    return found


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
