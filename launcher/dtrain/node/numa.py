"""Binds processes to the NUMA node of their GPUs: its cores, with memory preferred there.

Reads sysfs and needs neither numactl nor root.
"""

from __future__ import annotations

import contextlib
import os
import re

from dtrain.node.files import listed, number, numbered, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Collection, Sequence

MPOL_PREFERRED = 1
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "ppc64le": 261}
"""The system call's number by architecture, from the kernel's tables."""


class Binding:
    """The cores of one NUMA node that a process may use."""

    def __init__(self, node: int, cpus: Collection[int]) -> None:
        self.node = node
        self.cpus = frozenset(cpus)

    def apply(self, syscall: Callable[..., int] | None) -> None:
        """Bind this process, whose children and later programs inherit it.

        Ignores errors: without binding, a job is slower but correct. Container engines often
        forbid memory policies; the kernel then allocates memory where a thread runs, as always.
        """
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self.cpus)
        number = _SET_MEMPOLICY.get(os.uname().machine)
        if syscall is not None and number is not None:
            size = self.node // 64 * 8 + 8
            mask = (1 << self.node).to_bytes(size, "little")
            # The kernel reads one bit less than the given number of bits.
            syscall(number, MPOL_PREFERRED, mask, size * 8 + 1)


def load_syscall() -> Callable[..., int] | None:
    """The C function syscall, or None if Python has no ctypes."""
    try:
        import ctypes

        libc = ctypes.CDLL(None)

        def syscall(number: int, mode: int, mask: bytes, bits: int) -> int:
            arguments = ctypes.c_long(mode), ctypes.c_char_p(mask), ctypes.c_ulong(bits)
            found: int = libc.syscall(ctypes.c_long(number), *arguments)
            return found

        libc.syscall  # noqa: B018 - look it up now, not in a forked child
    except (ImportError, OSError, AttributeError):
        return None
    return syscall


def bindings(
    processes: Sequence[Sequence[int]], allowed: Collection[int], root: str = ""
) -> list[Binding | None]:
    """The binding of each process, given by the indices of its GPUs.

    A process is not bound if it has no GPU, if its GPUs are on several nodes or on an unknown one,
    or if ``allowed`` (the affinity mask) has fewer cores of the node than the processes have GPUs
    there: they would wait for each other while other cores idle. Nothing is bound on a machine
    with one node. ``root`` has the machine's ``proc`` and ``sys``.
    """
    cores = node_cpus(root)
    if len(cores) < 2:
        return [None] * len(processes)
    known = gpu_nodes(root)
    found: list[int | None] = []
    load: dict[int, int] = {}
    for gpus in processes:
        nodes = {known[gpu] if gpu < len(known) else None for gpu in gpus}
        node = nodes.pop() if len(nodes) == 1 else None
        found.append(node)
        if node is not None:
            load[node] = load.get(node, 0) + len(gpus)
    usable = {node: cores.get(node, frozenset()) & frozenset(allowed) for node in load}
    return [
        Binding(node, usable[node])
        if node is not None and len(usable[node]) >= load[node]
        else None
        for node in found
    ]


def node_cpus(root: str = "") -> dict[int, frozenset[int]]:
    """The cores of each NUMA node. Memory of devices can be a node without cores."""
    base = root + "/sys/devices/system/node"
    found = {
        node: _cpulist(text_of("%s/node%d/cpulist" % (base, node)) or "")
        for node in numbered(base, "node")
    }
    return {node: cpus for node, cpus in found.items() if cpus}


def gpu_nodes(root: str = "") -> list[int | None]:
    """The NUMA node of each GPU that this process may use, by index; None if unknown."""
    addresses = _nvidia(root) or _amd(root)
    nodes = [number(text_of("%s/sys/bus/pci/devices/%s/numa_node" % (root, a))) for a in addresses]
    return [node if node is not None and node >= 0 else None for node in nodes]


def _nvidia(root: str) -> list[str]:
    """PCI addresses in bus order, as CUDA and nvidia-smi count. Both skip GPUs whose device file
    is forbidden: a scheduler's cgroup hides GPUs in that way."""
    base = root + "/proc/driver/nvidia/gpus"
    found = []
    for address in listed(base):
        information = text_of("%s/%s/information" % (base, address)) or ""
        minor = re.search(r"Device Minor:\s*(\d+)", information)
        if minor is None or os.access("%s/dev/nvidia%s" % (root, minor[1]), os.R_OK | os.W_OK):
            found.append(address)
    return sorted(found, key=lambda address: (len(address), address))


def _amd(root: str) -> list[str]:
    """PCI addresses in the order of the compute driver, as HIP counts. Nodes of the driver that
    are processors, or forbidden, have no SIMD units."""
    base = root + "/sys/class/kfd/kfd/topology/nodes"
    found = []
    for name in sorted(listed(base), key=lambda name: (len(name), name)):
        text = text_of("%s/%s/properties" % (base, name)) or ""
        entry = {key: int(value) for key, value in re.findall(r"(?m)^(\w+) (\d+)$", text)}
        if entry.get("simd_count"):
            place = entry.get("location_id", 0)
            domain = entry.get("domain", 0)
            parts = domain, place >> 8 & 0xFF, place >> 3 & 0x1F, place & 7
            found.append("%04x:%02x:%02x.%x" % parts)
    return found


def _cpulist(text: str) -> frozenset[int]:
    """The numbers in a list such as ``0-31,64-95``."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
