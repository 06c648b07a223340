"""Selects the engine of a request, with the transport that it uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from dtrain.engines.contract import Engine
from dtrain.runs.request import Request
from dtrain.session.caller import Caller
from dtrain.transport.select import Transports


@contextmanager
def engine(request: Request, caller: Caller, *, starts: bool = False) -> Iterator[Engine]:
    """The engine of ``request``. ``starts``: whether it starts the job next."""
    cluster = request.spec().cluster
    if cluster.kubernetes is not None:
        from dtrain.engines.kubernetes.session import KubernetesEngine

        yield KubernetesEngine(request, caller)
        return
    kind: Callable[..., Engine]
    with closing(Transports(request.base, caller.ask, caller.observer.notice)) as transport:
        transport.prepare(cluster.hosts[: None if cluster.slurm is None else 1])
        if cluster.slurm is not None:
            from dtrain.engines.slurm.session import SlurmEngine

            kind = SlurmEngine
        else:
            if starts:
                transport.connect_early(cluster.hosts)
            # Imported only now, while dtrain connects to the hosts.
            from dtrain.engines.ssh.controller import SshEngine

            kind = SshEngine
        yield kind(request, caller, transport)
