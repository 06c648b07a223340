"""Ranks, and the variables from which most programs read them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    """The whole job: how many ranks each node runs, and where rank 0 listens."""

    name: str
    ranks_by_node: tuple[int, ...]
    master_address: str
    master_port: str
    restarts: str = "0"
    """The number of earlier attempts."""

    @property
    def size(self) -> int:
        """World size: the number of ranks in the whole job."""
        return sum(self.ranks_by_node)

    def first_rank(self, node_rank: int) -> int:
        """Global rank of a node's first worker."""
        return sum(self.ranks_by_node[:node_rank])


def nodes(world: World, node_rank: int) -> dict[str, str]:
    """The node rank, in the variables that Lightning and many Slurm scripts read."""
    return {"NODE_RANK": str(node_rank), "NNODES": str(len(world.ranks_by_node))}


def node_environment(world: World, node_rank: int) -> dict[str, str]:
    """Variables that are the same for all ranks of a node."""
    return {
        "MASTER_ADDR": world.master_address,
        "MASTER_PORT": world.master_port,
        "WORLD_SIZE": str(world.size),
        "LOCAL_WORLD_SIZE": str(world.ranks_by_node[node_rank]),
        **nodes(world, node_rank),
    }


def rank_environment(world: World, node_rank: int, local_rank: int) -> dict[str, str]:
    """Variables of one rank."""
    return {
        "RANK": str(world.first_rank(node_rank) + local_rank),
        "LOCAL_RANK": str(local_rank),
    }
