"""The rendezvous port of an attempt: random unless the cluster file sets it.

A random port rarely collides with another launch. It is not secret: once a worker listens, every
user of the host can see the port.
"""

from __future__ import annotations

import secrets

from dtrain.spec.model import ClusterFile
from dtrain.spec.ports import ports_needed

DRAWS = 16
"""Number of ports to try before a launch fails."""


def draw_ports(spec: ClusterFile, last: int | None = None) -> list[int]:
    """The ports to try, in order. Each is the first of the consecutive ports that a launch needs.

    ``last`` is the port of the previous attempt. It may still be busy, so it comes last.
    """
    rendezvous = spec.job.rendezvous
    if rendezvous.port is not None:
        return [rendezvous.port]
    # Spares that share a machine may need more ports than the hosts they replace.
    firsts = rendezvous.first_ports(ports_needed(spec))
    drawn = secrets.SystemRandom().sample(firsts, min(DRAWS, len(firsts)))
    return sorted(drawn, key=lambda port: port == last)
