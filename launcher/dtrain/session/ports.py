"""The port at which an attempt's workers meet, drawn at random where the file names none.

A random port rarely collides with that of another launch. It is no secret: once a worker listens,
every user of the host can see the port.
"""

from __future__ import annotations

import secrets

from dtrain.spec.model import ClusterFile
from dtrain.spec.ports import ports_needed

DRAWS = 16
"""Ports to try before a launch gives up."""


def draw_ports(spec: ClusterFile, last: int | None = None) -> list[int]:
    """The ports to try, in this order. Each is the first of as many as a launch needs.

    ``last`` is the port of the previous attempt, which may still be busy: it comes at the end.
    """
    rendezvous = spec.job.rendezvous
    if rendezvous.port is not None:
        return [rendezvous.port]
    low, high = rendezvous.ports
    # Spares on one machine may need more ports than the file's hosts did.
    firsts = range(low, max(low, high - ports_needed(spec) + 1) + 1)
    drawn = secrets.SystemRandom().sample(firsts, min(DRAWS, len(firsts)))
    return sorted(drawn, key=lambda port: port == last)
