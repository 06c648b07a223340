"""TPU: a slice of several hosts, on which TensorFlow trains from a single process.

That process, the coordinator, runs on the first host. On every host the TPU machine's own runtime
service does the work; Cloud TPU's images for slices ("-pod") start it with the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

RUNTIME_PORT = 8470
"""The gRPC port of a TPU machine's runtime service."""

_CHIPS = {1: (1, 1, 1), 2: (1, 2, 1), 4: (2, 2, 1), 8: (2, 4, 1)}
"""Chips along the three axes, by the number of chips of a host."""

Bounds = tuple[int, int, int]


def bounds(topology: str, hosts: int) -> tuple[Bounds, Bounds]:
    """Hosts of a slice along each axis, and chips of one host along each axis.

    ``topology`` is what Google calls it: chips along each axis, such as ``4x4`` or ``2x2x4``.
    Raises ValueError if it does not divide over ``hosts`` hosts.
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


def coordinator_environment(addresses: Sequence[str]) -> dict[str, str]:
    """For the process that trains on the slice whose hosts have these ``addresses``.

    TensorFlow's TPUClusterResolver takes the name of the TPU for a list of the hosts' runtime
    services where it is one, and then asks no Cloud API. It reads no ``TF_CONFIG``, so there is
    none. The chips belong to those services: a coordinator that loaded libtpu would want its
    host's for itself.
    """
    services = ",".join(f"grpc://{address}:{RUNTIME_PORT}" for address in addresses)
    return {"TPU_NAME": services, "TPU_LOAD_LIBRARY": "0"}
