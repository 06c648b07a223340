"""The GPUs and the network of a published run, from a table's names for them."""

from __future__ import annotations

import re
from functools import cache

from dtrain.diagnostics import UsageError
from dtrain.parallelism.cluster.efficiency import Efficiency
from dtrain.parallelism.cluster.hardware import Gpu, GpuCluster
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.runtime.layout import Layout
from planner.published.rows import Row, UnusableError, count


def gpu_of(name: str, interconnect: str = "") -> Gpu:
    """The GPU with any of the names that tables use.


    Raises:
        UnusableError: the planner does not know it.
    """
    try:
        gpu = _gpu(name)
    except UsageError:
        raise UnusableError(f"the GPU is not known: {name or 'blank'}") from None
    if re.search(r"\bpcie\b", interconnect, re.IGNORECASE) and not re.search(
        r"nvlink|nvswitch", interconnect, re.IGNORECASE
    ):
        # Sometimes only the interconnect column identifies the board.
        try:
            return hardware().gpu(re.sub(r"^(\w+?)-", r"\1-pcie-", gpu.name))
        except UsageError:
            return gpu
    return gpu


@cache
def _gpu(name: str) -> Gpu:
    table = hardware()
    words = r"\(.*?\)|\bdgx\b|\bhgx\b|\bnvidia\b|^\d+\s*[x×]\s*"
    plain = re.sub(words, " ", name, flags=re.IGNORECASE).strip()
    for written in (name, plain, re.sub(r"[\s,]+", "-", plain)):
        try:
            return table.gpu(written)
        except UsageError:
            continue
    # By model, board and memory, in any order, with other words in between.
    model = re.search(
        r"\b(?:[ahlvbtp]\d{1,3}[a-z]?|gh200|gb200|gb300|mi\d{3}x?|rtx\W?\w+)\b", name.casefold()
    )
    if model is None:
        return table.gpu(name)
    board = "-pcie" if "pcie" in name.casefold() else ""
    size = re.search(r"(\d+)\s*g", name.casefold())
    for written in ([f"{model[0]}{board}-{size[1]}gb"] if size else []) + [f"{model[0]}{board}"]:
        try:
            return table.gpu(written)
        except UsageError:
            continue
    return table.gpu(model[0])


OMNI_PATH = 135 / 400 / Efficiency().network
"""Speed of Omni-Path as a share of InfiniBand's of the same rate: Jean Zay's hosts sustain 135 of
4 × 100 Gb/s (stas00/ml-engineering, ``network/README.md``)."""


def cluster_of(row: Row, gpu: Gpu, layout: Layout) -> GpuCluster:
    usual = hardware().machine(gpu.machine)
    per_host = count(row, "gpus_per_node") or usual.gpus_per_host
    interconnect = row.get("interconnect", "")
    gbps = network_gbps(interconnect, per_host)
    if gbps is None:
        gbps = usual.network_gbps * per_host / usual.gpus_per_host
    if re.search(r"omni-?path", interconnect, re.IGNORECASE):
        gbps *= OMNI_PATH
    gpus = layout.world_size
    return GpuCluster(gpu=gpu, gpus=gpus, gpus_per_host=min(per_host, gpus), network=gbps / 8)


_RATE = r"([\d.,]*\d)\s*(T|G)(b|B)(?:it|yte)?(?:ps|/s|it/s)?"
_PORTS = {"XDR": 800, "NDR200": 200, "NDR": 400, "HDR100": 100, "HDR": 200, "EDR": 100}
"""Gb/s of InfiniBand's ports of four lanes, by generation; of two lanes with a number."""


def network_gbps(text: str, gpus_per_host: int) -> float | None:
    """Gb/s of one host, all NICs together, from a table's text about the network, if it has it."""
    if several := re.search(rf"(\d+)\s*[x×*]\s*(?:{_RATE}|(\d+)G\b)", text):
        each = float(several[5] or 0) or _gbps(several[2], several[3], several[4])
        return int(several[1]) * each
    for found in re.finditer(_RATE, text):
        rate, after = _gbps(*found.groups()), text[found.end() :].casefold()
        before = text[: found.start()].casefold().rpartition(";")[2]
        clause = f"{before} {after.partition(';')[0]}"
        if re.search(r"nvlink|nvswitch|\bpcie", clause):
            continue
        if re.search(r"per (gpu|nic|rank|card)|/gpu", clause):
            return rate * gpus_per_host
        if re.search(r"per (node|host|server|machine)|/node|ethernet", clause) or rate > 800:
            return rate
        # An InfiniBand rate alone is one port's; such hosts have a port for each GPU.
        return rate * gpus_per_host if re.search(r"\bib\b|infiniband|hdr|ndr", clause) else rate
    if port := re.search(rf"(?:(\d+)\s*[x×*]\s*)?\b({'|'.join(_PORTS)})\b", text):
        return int(port[1] or gpus_per_host) * _PORTS[port[2]]
    for machine in hardware().machines:
        for name in (machine.name, *machine.aliases):
            if len(name) > 2 and re.search(rf"\b{re.escape(name)}\b", text.replace(" ", "-"), re.I):
                return machine.network_gbps * gpus_per_host / machine.gpus_per_host
    return None


def _gbps(number_text: str, prefix: str, unit: str) -> float:
    try:
        rate = float(number_text.replace(",", ""))
    except ValueError:
        rate = 0.0
    return max(rate * (1000 if prefix == "T" else 1) * (8 if unit == "B" else 1), 1e-3)
