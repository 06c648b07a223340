"""JAX: the environment in which ``jax.distributed.initialize()`` needs no arguments.

JAX reads the coordinator's address from its own variable, but detects the number of processes and
the process id from a known kind of cluster. Any launcher can set Open MPI's variables, so dtrain
uses these (JAX 0.10, ``jax/_src/clusters/ompi_cluster.py``).
"""

from __future__ import annotations

from dtrain.environ.ranks import World
from dtrain.environ.template import Template
from dtrain.environ.torchrun import address_and_port


def node_environment(world: World) -> dict[str, str]:
    """Variables that are the same for all processes."""
    coordinator = address_and_port(world.master_address, world.master_port)
    scheme = "tcp6" if ":" in world.master_address else "tcp"
    return {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "OMPI_MCA_orte_hnp_uri": Template(f"0.0;{scheme}://", coordinator),
        "OMPI_COMM_WORLD_SIZE": str(world.size),
    }


def rank_environment(
    world: World, node_rank: int, local_rank: int, devices: int | None
) -> dict[str, str]:
    """Variables of one process. JAX assigns it the device with its local rank, unless it has all
    ``devices`` of its host."""
    environment = {
        "OMPI_COMM_WORLD_RANK": world.rank(node_rank, local_rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": world.local_rank(local_rank),
    }
    if devices:
        environment["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(devices)))
    return environment
