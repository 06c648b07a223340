"""torch: the environment that torchrun gives each worker, and torchrun's own command line.

A rank that dtrain starts directly gets exactly the variables that torchrun sets (PyTorch 2.13
and 2.14, ``LocalElasticAgent._start_workers``), so scripts work the same with and without it.
"""

from __future__ import annotations

from typing import Literal

from dtrain.environ import ranks
from dtrain.environ.ranks import World
from dtrain.environ.template import Slot, Template

LOGS_OF_RANKS = {"PET_REDIRECTS": "3"}
"""Makes torchrun write stdout and stderr of each rank to files."""
LOGS = {"PET_REDIRECTS": Template(Slot("3", "${PET_REDIRECTS:-0}"))}
"""What the agent sets for it. A command that users run by hand does not need it."""


def node_environment(world: World, node_rank: int) -> dict[str, str]:
    """Variables that are the same for all ranks of a node, if dtrain starts them directly."""
    environment = {
        **ranks.node_environment(world, node_rank),
        "GROUP_RANK": world.node_rank(node_rank),
        "GROUP_WORLD_SIZE": str(len(world.ranks_by_node)),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(world.size),
        "TORCHELASTIC_RUN_ID": world.name,
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": world.restarts,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    return environment | threads(world.ranks_by_node[node_rank])


def rank_environment(world: World, node_rank: int, local_rank: int) -> dict[str, str]:
    own = ranks.rank_environment(world, node_rank, local_rank)
    return {**own, "ROLE_RANK": own["RANK"]}


def threads(local_ranks: int) -> dict[str, str]:
    """torchrun's default: one OpenMP thread per rank if a node has several ranks."""
    return {"OMP_NUM_THREADS": "1"} if local_ranks > 1 else {}


def torchrun_arguments(
    world: World, node_rank: int, node_address: str, backend: Literal["static", "c10d"]
) -> list[str]:
    """torchrun's options on one node, up to the script.

    ``is_host`` sets the store's host explicitly: torchrun's own detection accepts any loopback
    name and misses aliases and second network cards.
    """
    arguments = [
        f"--nnodes={len(world.ranks_by_node)}",
        f"--nproc-per-node={world.ranks_by_node[node_rank]}",
        "--max-restarts=0",
        Template("--rdzv-id=", world.name),
        f"--rdzv-backend={backend}",
        Template("--local-addr=", node_address),
    ]
    if backend == "static":
        return [
            *arguments,
            Template("--node-rank=", world.node_rank(node_rank)),
            Template("--master-addr=", world.master_address),
            Template("--master-port=", world.master_port),
        ]
    endpoint = address_and_port(world.master_address, world.master_port)
    is_host = "true" if node_rank == 0 else "false"
    if world.scripted:
        test = "$( ((dtrain_node_rank)) && echo false || echo true)"
        is_host = Template(Slot(is_host, test))
    return [
        *arguments,
        Template("--rdzv-endpoint=", endpoint),
        Template("--rdzv-conf=is_host=", is_host),
    ]


def address_and_port(address: str, port: str) -> str:
    """``host:port``, with the brackets that an IPv6 address needs."""
    if isinstance(address, Template):
        return Template(address, ":", port)
    return Template(f"[{address}]:" if ":" in address else f"{address}:", port)
