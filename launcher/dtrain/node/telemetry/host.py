"""CPU, memory, disks and networks of this host, from /proc and /sys."""

from __future__ import annotations

import os
import time

from dtrain.node.files import listed, read_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Iterable, Iterator

    from dtrain.node.agent.wire import Json

TICKS = os.sysconf("SC_CLK_TCK")
MAX_DEVICES = 256
RESCAN = 60.0
"""Seconds between two searches for devices."""


class HostCounters:
    """Reads counters, and returns rates since the last `read`."""

    def __init__(self) -> None:
        self._rates = {
            "disk": Rate(disk_bytes),
            "network": Rate(network_bytes),
            "infiniband": Rate(infiniband_bytes),
        }
        self._losses = Rate(lost_packets)
        self._cpu = Rate(cpu_ticks)

    def read(self) -> Json:
        busy = self._cpu.read()
        found: Json = {
            "cpu": None if busy is None else round(busy[0] / TICKS, 2),
            "cpus": os.cpu_count(),
            "memory": memory(),
        }
        for name, rate in self._rates.items():
            values = rate.read()
            found[name] = None if values is None else [round(value) for value in values]
        lost = self._losses.read()
        found["losses"] = None if lost is None else round(lost[0], 2)
        return found


class Rate:
    """The change of counters in one second."""

    def __init__(self, count: Callable[[], list[int] | None]) -> None:
        self._count = count
        self._last: tuple[float, list[int]] | None = None

    def read(self) -> list[float] | None:
        """None at first, and where the host has no such counter."""
        now, counted = time.monotonic(), self._count()
        last, self._last = self._last, None if counted is None else (now, counted)
        if last is None or counted is None or now <= last[0]:
            return None
        # A counter shrinks when its device is removed.
        return [max(0.0, (a - b) / (now - last[0])) for a, b in zip(counted, last[1])]


class Devices:
    """The devices of a kind, searched for rarely: a search reads many folders."""

    def __init__(self, search: Callable[[], list[str]]) -> None:
        self._search = search
        self._found: list[str] = []
        self._until = 0.0

    def get(self) -> list[str]:
        now = time.monotonic()
        if now >= self._until:
            self._until = now + RESCAN
            self._found = self._search()[:MAX_DEVICES]
        return self._found


def cpu_ticks() -> list[int] | None:
    """The ticks that the CPUs were busy since the boot."""
    line = (read_file("/proc/stat") or b"").partition(b"\n")[0].split()
    if len(line) < 5:
        return None
    user, nice, system, _idle, _wait, *others = map(int, line[1:])
    # Guests count as user time already.
    return [user + nice + system + sum(others[:3])]


def memory() -> list[int] | None:
    found = {}
    for line in (read_file("/proc/meminfo") or b"").splitlines():
        name, _, value = line.partition(b":")
        if name in (b"MemTotal", b"MemAvailable"):
            found[name] = int(value.split()[0]) << 10
    if len(found) < 2:
        return None
    return [found[b"MemTotal"] - found[b"MemAvailable"], found[b"MemTotal"]]


def _disks() -> list[str]:
    """Whole disks: a volume or a partition would count their bytes again."""
    return [name for name in listed("/sys/block") if os.path.exists("/sys/block/%s/device" % name)]


def _ports() -> list[str]:
    base = "/sys/class/infiniband"
    return [
        "%s/%s/ports/%s/counters" % (base, device, port)
        for device in listed(base)
        for port in listed("%s/%s/ports" % (base, device))
    ]


def _carries_others(interface: str) -> bool:
    """Whether other interfaces count the same bytes: a bond, a bridge, or a port of a bridge."""
    names = listed("/sys/class/net/" + interface)
    virtual = "device" not in names
    return any(name.startswith("lower_") for name in names) or ("master" in names and virtual)


def _interfaces() -> list[str]:
    names = [line.partition(b":")[0].strip().decode() for line in _network_lines()]
    return [name for name in names if name != "lo" and not _carries_others(name)]


def _network_lines() -> list[bytes]:
    return (read_file("/proc/net/dev") or b"").splitlines()[2:]


PORT_ERRORS = (
    "symbol_error",
    "port_rcv_errors",
    "port_xmit_discards",
    "../hw_counters/packet_seq_err",
    "../hw_counters/local_ack_timeout_err",
)
DISKS, PORTS, INTERFACES = Devices(_disks), Devices(_ports), Devices(_interfaces)


def _total(pairs: Iterable[tuple[int, int]]) -> list[int] | None:
    """The sums of what devices have received and sent; None without devices."""
    found = [*pairs]
    return [sum(each) for each in zip(*found)] or None


def _interface_counters() -> Iterator[list[int]]:
    wanted = set(INTERFACES.get())
    for line in _network_lines() if wanted else ():
        name, _, counters = line.partition(b":")
        fields = counters.split()
        if len(fields) > 10 and name.strip().decode() in wanted:
            yield [int(field) for field in fields]


def disk_bytes() -> list[int] | None:
    wanted = set(DISKS.get())
    lines = (read_file("/proc/diskstats") or b"").splitlines() if wanted else ()
    disks = (fields for fields in map(bytes.split, lines) if len(fields) > 9)
    sectors = ((disk[5], disk[9]) for disk in disks if disk[2].decode() in wanted)
    return _total((512 * int(read), 512 * int(written)) for read, written in sectors)


def network_bytes() -> list[int] | None:
    return _total((fields[0], fields[8]) for fields in _interface_counters())


def lost_packets() -> list[int] | None:
    """TCP segments sent again, and errors of interfaces and InfiniBand ports."""
    lines = (read_file("/proc/net/snmp") or b"").splitlines()
    tcp = [line.split() for line in lines if line.startswith(b"Tcp:")]
    found = int(dict(zip(*tcp)).get(b"RetransSegs", 0)) if len(tcp) == 2 else 0
    found += sum(fields[2] + fields[10] for fields in _interface_counters())
    for folder in PORTS.get():
        errors = [(read_file("%s/%s" % (folder, name)) or b"").strip() for name in PORT_ERRORS]
        found += sum(int(count) for count in errors if count.isdigit())
    return [found]


def infiniband_bytes() -> list[int] | None:
    found = None
    for folder in PORTS.get():
        names = ("port_rcv_data", "port_xmit_data")
        counters = [(read_file("%s/%s" % (folder, name)) or b"").strip() for name in names]
        if all(map(bytes.isdigit, counters)):  # a port without counters has a text there
            found = found or [0, 0]
            for at, words in enumerate(counters):  # of four bytes
                found[at] += 4 * int(words)
    return found


def storage(folder: bytes | int) -> list[int] | None:
    """Used and total bytes of the disk with a folder."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    used = max(0, disk.f_blocks - disk.f_bavail)  # more can be free than a quota allows
    return [used * disk.f_frsize, disk.f_blocks * disk.f_frsize]
