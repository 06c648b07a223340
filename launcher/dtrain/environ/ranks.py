"""Ranks, and the variables from which most programs read them."""

from __future__ import annotations

from dataclasses import field
from itertools import accumulate

from dtrain.environ.template import number
from dtrain.records import dataclass


@dataclass(frozen=True, slots=True)
class World:
    """The whole job: how many ranks each node runs, and where rank 0 listens."""

    name: str
    ranks_by_node: tuple[int, ...]
    master_address: str
    master_port: str
    restarts: str = "0"
    """The number of earlier attempts."""
    scripted: bool = False
    """Whether one script starts all ranks, each with its numbers in shell variables."""
    _first_ranks: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sums = tuple(accumulate(self.ranks_by_node, initial=0))
        object.__setattr__(self, "_first_ranks", sums)

    @property
    def size(self) -> int:
        """World size: the number of ranks in the whole job."""
        return self._first_ranks[-1]

    def first_rank(self, node_rank: int) -> int:
        """Global rank of a node's first worker."""
        return self._first_ranks[node_rank]

    def rank(self, node_rank: int, local_rank: int) -> str:
        """Global rank of a worker."""
        rank = self.first_rank(node_rank) + local_rank
        return number("rank", rank, scripted=self.scripted)

    def local_rank(self, local_rank: int) -> str:
        """Number of a worker on its node."""
        return number("local_rank", local_rank, scripted=self.scripted)

    def node_rank(self, node_rank: int) -> str:
        """Number of a node."""
        return number("node_rank", node_rank, scripted=self.scripted)


def nodes(world: World, node_rank: int) -> dict[str, str]:
    """The node rank, in the variables that Lightning and many Slurm scripts read."""
    return {"NODE_RANK": world.node_rank(node_rank), "NNODES": str(len(world.ranks_by_node))}


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
    return {"RANK": world.rank(node_rank, local_rank), "LOCAL_RANK": world.local_rank(local_rank)}
