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
def engine(
    request: Request, caller: Caller, transports: Transports | None = None
) -> Iterator[Engine]:
    """The engine of ``request``. It closes ``transports``, the result of `connect` if it starts the
    job next."""
    cluster = request.spec().cluster
    if cluster.kubernetes is not None:
        from dtrain.engines.kubernetes.session import KubernetesEngine

        yield KubernetesEngine(request, caller)
        return
    kind: Callable[..., Engine]
    if transports is None:
        transports = Transports(request.base, caller.ask, caller.observer.notice)
        transports.prepare(cluster.hosts[: None if cluster.slurm is None else 1])
    with closing(transports):
        if cluster.slurm is not None:
            from dtrain.engines.slurm.session import SlurmEngine

            kind = SlurmEngine
        else:
            from dtrain.engines.ssh.controller import SshEngine

            kind = SshEngine
        yield kind(request, caller, transports)


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
