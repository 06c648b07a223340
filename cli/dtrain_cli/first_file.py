"""The text of a first cluster file, from the user's answers and the facts of the hosts. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import mode

from dtrain import hostlist
from dtrain.checks import Evidence, HostFacts
from dtrain.diagnostics import UsageError
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.records import dataclass
from dtrain.spec.yaml_text import literal


@dataclass(frozen=True, slots=True)
class Answers:
    """What only the user knows."""

    hosts: tuple[str, ...]
    framework: str
    script: str
    user: str | None = None
    gpus: int | None = None
    """Of each host; None if it is unknown, or if a probe counts them."""
    slots: int | None = None
    """Of each host, in a hostfile."""


def text(answers: Answers, evidence: Evidence | None) -> str:
    """Return a cluster file; ``evidence`` is the result of a probe of the hosts, if any."""
    hosts = list(evidence.hosts) if evidence is not None else []
    return "\n".join(
        [
            "# Written by `dtrain init`. Show what a launch would start:",
            "#   dtrain launch FILE --dry-run",
            "# Check whether the hosts are ready:",
            "#   dtrain check FILE",
            "cluster:",
            f"  hosts: {json.dumps(hostlist.fold(answers.hosts))}  # the order is the node rank",
            *_devices(hosts, answers, probed=evidence is not None),
            *_network(hosts),
            *([f"  ssh: {{user: {literal(answers.user)}}}"] if answers.user else []),
            *_python(hosts, answers),
            *_overrides(hosts, answers),
            "",
            "job:",
            f"  framework: {answers.framework}",
            f"  {program(answers.script)}",
            "  # Sends the folder of this file to every host first.",
            "  sync: {source: ., exclude: [.git, .venv]}",
            "",
        ]
    )


def program(script: str) -> str:
    """The key for a script, or for a module that is written as for Python: ``-m my.train``."""
    kind, _, module = script.partition(" ")
    return f"module: {literal(module)}" if kind == "-m" else f"script: {literal(script)}"


def _devices(hosts: Sequence[HostFacts], answers: Answers, *, probed: bool) -> Iterator[str]:
    """Without a number, nothing can be launched: a guess would start the wrong workers."""
    if not hosts and answers.gpus is None and answers.slots is not None:
        yield f"  gpus: {answers.slots}  # CHANGE if the slots of the hostfile are no GPUs"
        return
    if not hosts and answers.gpus is None:
        why = "no host could be reached" if probed else "the hosts were not inspected"
        yield f"  gpus:  # CHANGE: number of GPUs per host, 0 for CPU workers; {why}"
        return
    if not hosts:
        yield f"  gpus: {answers.gpus}  # on each host"
        return
    found = mode(_gpus(host) for host in hosts)
    count = answers.gpus if answers.gpus is not None else found
    yield f"  gpus: {count}  # on each host{f'; the hosts show {found}' if count != found else ''}"
    names = {gpu["name"] for host in hosts for gpu in host.fact("gpus").get("gpus", ())}
    for name in names if len(names) == 1 else ():
        if name and (known := in_table(name)):
            yield f"  gpu: {known}  # {name}"


def in_table(name: str) -> str | None:
    """The name of a GPU in the planner's hardware table, or None if the table lacks it."""
    for written in (name, name.removeprefix("NVIDIA ")):
        try:
            return hardware().gpu(written).name
        except UsageError:
            continue
    return None


def _network(hosts: Sequence[HostFacts]) -> Iterator[str]:
    interfaces = [host.interface for host in hosts if host.interface not in (None, "lo")]
    if len(hosts) < 2 or len(interfaces) < len(hosts):
        return
    parts = [f"interface: {literal(mode(interfaces))}"]
    speeds = {_gbps(host) for host in hosts}
    if len(speeds) == 1 and (speed := speeds.pop()):
        parts.append(f"gbps: {speed:g}")
    yield f"  network: {{{', '.join(parts)}}}"


def _gbps(host: HostFacts) -> float:
    """Gigabits per second of the host's fastest network: all RDMA ports, or the interface."""
    rdma = sum(
        port["rate"] or 0 for port in host.fact("infiniband").values() if port["state"] == "ACTIVE"
    )
    speed = host.interfaces.get(host.interface or "", {}).get("speed") or 0
    return float(rdma or speed / 1000)


def _python(hosts: Sequence[HostFacts], answers: Answers) -> Iterator[str]:
    """The Python key, if `python3` of some host lacks the framework: only the user knows where
    it is."""
    without = [
        host.name
        for host in hosts
        if not host.fact("interpreter").get("framework", {}).get("version")
    ]
    if without and answers.framework != "none":
        where = hostlist.fold(without)
        yield f"  python: python3  # CHANGE: {answers.framework} is not installed in it on {where}"


def _overrides(hosts: Sequence[HostFacts], answers: Answers) -> Iterator[str]:
    """Values that differ between hosts, and addresses for names that other hosts cannot resolve."""
    if not hosts:
        return
    gpus = mode(_gpus(host) for host in hosts)
    interface = mode(host.interface for host in hosts)
    found: dict[str, Mapping[str, str]] = {}
    for host in hosts:
        own: dict[str, str] = {}
        if _unknown(host, hosts) and host.interface_address:
            own["address"] = literal(host.interface_address)
        if _gpus(host) != gpus and (answers.gpus is None or _gpus(host) < answers.gpus):
            own["gpus"] = str(_gpus(host))
        if len(hosts) > 1 and host.interface not in (interface, None, "lo"):
            own["interface"] = literal(host.interface)
        if own:
            found[host.name] = own
    if found:
        yield "  overrides:"
    for name, differing in found.items():
        values = ", ".join(f"{key}: {value}" for key, value in differing.items())
        yield f"    {literal(name)}: {{{values}}}"


def _unknown(host: HostFacts, hosts: Sequence[HostFacts]) -> bool:
    """Whether another host cannot resolve this host's name."""
    for peer in hosts:
        known = peer.fact("names").get("hosts", {}).get(host.name)
        if peer is not host and known is not None:
            addresses = set(known.get("addresses", ()))
            if not addresses or not addresses & host.addresses:
                return True
    return False


def _gpus(host: HostFacts) -> int:
    return len(host.fact("gpus").get("gpus", ()))
