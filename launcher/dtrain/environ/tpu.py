"""TPU: the environment of a slice of several hosts, one process on each.

Cloud TPU's own machines read the same facts from their metadata server. A launch says them
itself, so that every host of a slice agrees on the order of its hosts with the cluster file.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

RUNTIME_PORT = 8470
"""Where a TPU machine's runtime service takes TensorFlow's work (gRPC)."""

_CHIPS = {1: (1, 1, 1), 2: (1, 2, 1), 4: (2, 2, 1), 8: (2, 4, 1)}
"""How many chips a host can have, and how they lie along the three axes."""

Bounds = tuple[int, int, int]


def bounds(topology: str, hosts: int) -> tuple[Bounds, Bounds]:
    """Hosts of a slice along each axis, and chips of one host along each axis.

    ``topology`` is what Google calls it: chips along each axis, such as ``4x4`` or ``2x2x4``.
    Raises ValueError where it does not divide over so many hosts.
    """
    sizes = [int(size) for size in topology.split("x")]
    x, y, z = (*sizes, 1, 1, 1)[:3]
    chips = _CHIPS.get(prod(sizes) // hosts) if prod(sizes) % hosts == 0 else None
    if chips is None or x % chips[0] or y % chips[1] or z % chips[2]:
        raise ValueError(
            f"a TPU slice of {topology} has {prod(sizes)} chips, which {hosts} hosts do not share "
            "as 1, 2, 4 or 8 each"
        )
    return (x // chips[0], y // chips[1], z // chips[2]), chips


def usual(hosts: int) -> str:
    """The topology of a slice of ``hosts`` hosts with four chips each, as flat as can be."""
    rows = next(rows for rows in range(int(hosts**0.5), 0, -1) if hosts % rows == 0)
    return f"{2 * rows}x{2 * hosts // rows}"


def slice_environment(topology: str, addresses: Sequence[str], port: int) -> dict[str, str]:
    """What all hosts of a slice share.

    libtpu connects its processes at ``port`` of each address. TensorFlow's TPUClusterResolver
    takes the name of the TPU for a list of the hosts' runtime services where it is one, and then
    asks no Cloud API. It reads no ``TF_CONFIG``, so there is none.
    """
    hosts, chips = bounds(topology, len(addresses))
    services = ",".join(f"grpc://{address}:{RUNTIME_PORT}" for address in addresses)
    return {
        "TPU_WORKER_HOSTNAMES": ",".join(addresses),
        "TPU_PROCESS_ADDRESSES": ",".join(f"{address}:{port}" for address in addresses),
        "TPU_PROCESS_PORT": str(port),
        "TPU_PROCESS_BOUNDS": ",".join(map(str, hosts)),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": ",".join(map(str, chips)),
        # Take these, and ask no metadata server, which other clouds do not have.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_NAME": services,
    }


def worker_environment(index: int) -> dict[str, str]:
    """What tells one host of a slice from the others: its number, to libtpu and to TensorFlow."""
    return {"TPU_WORKER_ID": str(index), "CLOUD_TPU_TASK_ID": str(index)}
