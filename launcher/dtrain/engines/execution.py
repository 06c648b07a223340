"""Runs a command on the hosts of a cluster file or of a run: `dtrain exec`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import replace

from dtrain import hostlist
from dtrain.diagnostics import ExitCode, UsageError
from dtrain.launchplan.build import build
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.session.relays.commands import Commands, Outcome, Receiver, Target
from dtrain.session.stopping.control import Control
from dtrain.spec.additions import check_text
from dtrain.spec.secrets import secret_names
from dtrain.transport.contract import Transport
from dtrain.transport.questions import Ask
from dtrain.transport.select import Transports

IDENTITY = ("DTRAIN_RUN_ID", "DTRAIN_RUN_DIR", "DTRAIN_HOST")
"""Variables that mark the processes of a run. A command with them would end with the run."""


def execute(
    request: Request,
    record: Record | None,
    argv: Sequence[str],
    *,
    hosts: Collection[str] | None,
    limit: float | None,
    receiver: Receiver,
    control: Control,
    ask: Ask | None,
    notice: Callable[[str], None],
) -> list[Outcome]:
    """Run ``argv`` on all hosts, or on ``hosts``. One word alone is a line for ``/bin/sh``.

    Raises UsageError for a command that no program can get or a host that is not there, and if the
    engine has not chosen hosts yet.
    """
    if not argv:
        raise UsageError("there is no command to run")
    for number, word in enumerate(argv, 1):
        check_text(word, f"word {number} of the command")
    if len(argv) == 1:
        argv = ("/bin/sh", "-c", argv[0])
    hidden = (*IDENTITY, *secret_names(request.spec()))
    transport: Transport
    if request.spec().cluster.kubernetes is not None:
        from dtrain.engines.kubernetes.pod_programs import PodTransport

        transport = pods = PodTransport(request, record)
        chosen = _chosen(pods.targets, hosts)
    else:
        chosen = _chosen(_targets(request, record), hosts)
        transport = connections = Transports(request.base, ask, notice)
        connections.prepare([target.via for target in chosen])
    with closing(transport):
        return Commands(chosen, argv, transport, hidden=hidden, limit=limit).run(receiver, control)


def exit_code(outcomes: Iterable[Outcome], *, interrupted: bool) -> ExitCode:
    """The worst of all hosts: interrupted, a host failed, the command failed, done."""
    if interrupted:
        return ExitCode.INTERRUPTED
    return max((one.exit_code for one in outcomes), default=ExitCode.OK)


def _targets(request: Request, record: Record | None) -> list[Target]:
    """Where commands run on the hosts of a run, or of a cluster file. Over SSH, each host has its
    own connection.

    Raises UsageError if the hosts are not known.
    """
    if request.spec().cluster.slurm is not None:
        from dtrain.engines.slurm import step

        return step.targets(request, record)
    spec = request.spec() if record is None else record.spec()
    plan = build(spec, local_python=sys.executable) if record is None else record.plan
    found = [Target(part.host.name, part.host, plan.agent_python(part)) for part in plan.hosts]
    for host in spec.cluster.spares:
        part = replace(plan.hosts[0], host=host, python=host.python)
        found.append(Target(host.name, host, plan.agent_python(part), spare=True))
    return found


def _chosen(known: Sequence[Target], hosts: Collection[str] | None) -> list[Target]:
    if hosts is None:
        return [target for target in known if not target.spare]
    names = [target.host for target in known]
    if unknown := [host for host in hosts if host not in names]:
        raise UsageError(
            f"there is no host {hostlist.brief(unknown)} in this cluster",
            hint=f"its hosts are {hostlist.brief(names)}",
        )
    return [target for target in known if target.host in hosts]
