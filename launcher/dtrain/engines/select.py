"""Selects the engine of a request, with the transport that it uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from dtrain.diagnostics import UsageError
from dtrain.engines.contract import Engine
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.session.caller import Caller
from dtrain.session.relays.commands import Target
from dtrain.transport.select import Transports


@contextmanager
def engine(request: Request, caller: Caller, *, starts: bool = False) -> Iterator[Engine]:
    """The engine of ``request``. ``starts``: whether it starts the job next."""
    if request.spec().cluster.kubernetes is not None:
        from dtrain.engines.kubernetes.session import KubernetesEngine

        yield KubernetesEngine(request, caller)
        return
    cluster = request.spec().cluster
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


def targets(request: Request, record: Record | None) -> list[Target]:
    """Where commands run on the hosts of a run, or of a cluster file.

    Raises UsageError if the hosts are not known.
    """
    if request.spec().cluster.kubernetes is not None:
        raise UsageError(
            "dtrain exec does not reach pods", hint="use `kubectl exec POD -- COMMAND`"
        )
    if request.spec().cluster.slurm is not None:
        from dtrain.engines.slurm import step

        return step.targets(request, record)
    from dtrain.engines.ssh import targets as ssh

    return ssh.targets(request, record)
