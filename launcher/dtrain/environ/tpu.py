"""TPU: TensorFlow trains on a slice of several hosts from one process.

This process, the coordinator, runs on the first host. The TPU runtime service on each host does
the work; Cloud TPU's images for slices ("-pod") start it at boot.
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

    ``topology`` has Google's format: chips along each axis, such as ``4x4`` or ``2x2x4``.
    Raises ValueError if ``hosts`` hosts cannot share the chips equally.
    """
    sizes = [int(size) for size in topology.split("x")]
    x, y, z = (*sizes, 1, 1, 1)[:3]
    chips = _CHIPS.get(prod(sizes) // hosts) if prod(sizes) % hosts == 0 else None
    if chips is None or x % chips[0] or y % chips[1] or z % chips[2]:
        raise ValueError(
            f"a TPU slice of {topology} has {prod(sizes)} chips, which {hosts} hosts cannot share "
            "equally (a host has 1, 2, 4 or 8 chips)"
        )
    return (x // chips[0], y // chips[1], z // chips[2]), chips


def usual(hosts: int) -> str:
    """The most square topology of a slice of ``hosts`` hosts with four chips each."""
    rows = next(rows for rows in range(int(hosts**0.5), 0, -1) if hosts % rows == 0)
    return f"{2 * rows}x{2 * hosts // rows}"


def coordinator_environment(addresses: Sequence[str]) -> dict[str, str]:
    """Environment of the coordinator of the slice whose hosts have these ``addresses``.

    TensorFlow's TPUClusterResolver accepts a list of the runtime services as the name of the TPU,
    and then calls no Cloud API. It does not read ``TF_CONFIG``, so dtrain does not set it. The
    runtime services own the chips: a coordinator that loads libtpu would claim those of its host.
    """
    services = ",".join(f"grpc://{address}:{RUNTIME_PORT}" for address in addresses)
    return {"TPU_NAME": services, "TPU_LOAD_LIBRARY": "0"}
