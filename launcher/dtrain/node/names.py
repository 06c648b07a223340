"""The names of processes in files and streams, as `dtrain.launchplan.names` has them.

Shipped to nodes: Python 3.8, standard library only.
"""

from __future__ import annotations


def process_name(role: str, index: int) -> str:
    """The name of a process that dtrain starts: ``worker-3``."""
    return "%s-%d" % (role, index)


def rank_name(rank: int) -> str:
    """The name of a rank that torchrun starts: ``rank-3``."""
    return "rank-%d" % rank
