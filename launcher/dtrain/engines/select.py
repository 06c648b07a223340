"""Selects the engine of a request, with the transport that it uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from dtrain.diagnostics import UsageError
from dtrain.engines.contract import Engine
from dtrain.engines.ssh.controller import SshEngine
from dtrain.engines.ssh.targets import targets as ssh_targets
from dtrain.runs.record import Record, Request
from dtrain.session.commands import Target
from dtrain.session.control import Control
from dtrain.session.observer import Observer
from dtrain.transport.questions import Ask
from dtrain.transport.select import Transports


@contextmanager
def engine(
    request: Request,
    observer: Observer,
    control: Control,
    *,
    ask: Ask | None = None,
    on_running: Callable[[str], None] = lambda run: None,
) -> Iterator[Engine]:
    """The engine of a launch. ``on_running`` gets the run's name once the job no longer needs this
    process to start: all workers run, or a queue has it. ``ask`` asks a person for passphrases."""
    if request.spec().cluster.kubernetes is not None:
        from dtrain.engines.kubernetes.session import KubernetesEngine

        yield KubernetesEngine(request, observer=observer, control=control, on_running=on_running)
        return
    kind: Callable[..., Engine] = SshEngine
    if request.spec().cluster.slurm is not None:
        # Most launches need nothing of Slurm.
        from dtrain.engines.slurm.session import SlurmEngine

        kind = SlurmEngine
    with closing(Transports(request.base, ask, observer.notice)) as transport:
        transport.load(request.spec().cluster.hosts)
        yield kind(
            request,
            transport=transport,
            observer=observer,
            control=control,
            on_running=on_running,
        )


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
    return ssh_targets(request, record)
