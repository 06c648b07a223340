"""What a check asks of each host: the probes, and how thorough they are. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TypeVar

from dtrain.launchplan.plan import HostPlan, LaunchPlan
from dtrain.node import programs
from dtrain.node.facts.orders import GatherOrder
from dtrain.records import dataclass
from dtrain.spec.model import Job

INTERPRETER_SECONDS = 180.0
"""Limit for setup and the import of a framework, with cold caches and slow file servers."""
CONNECT_SECONDS = 75.0
"""Limit for an SSH connection with all its attempts, see `dtrain.transport.retry`."""
MARGIN = 15.0

ALL_PAIRS = 64
"""Up to this many hosts, a quick check connects every host to every other."""

_Host = TypeVar("_Host")

CHEAP = ("interpreter", "machine", "script", "names", "network", "storage", "container")
"""The interpreter first: it takes longest, and the others run beside it."""
ALL = (*CHEAP, "memory", "leftovers", "infiniband", "gpus")


@dataclass(frozen=True, slots=True)
class Depth:
    """How much to check."""

    probes: tuple[str, ...]
    thorough: bool
    """Whether to run the setup lines, import the framework, and compare packages and code."""
    interpreter: float = INTERPRETER_SECONDS
    """Seconds that the job's interpreter may take."""
    gathering: float = CONNECT_SECONDS + INTERPRETER_SECONDS + MARGIN
    """Seconds in which a host must report all its facts."""
    dialing: float = 120.0
    """Seconds that a host may take to dial the other hosts."""
    round_trip: float = 0.0
    """Seconds of a round trip by which a host's clock is known well enough."""


THOROUGH = Depth(ALL, thorough=True)
QUICK = Depth(CHEAP, thorough=False, interpreter=10.0, gathering=20.0, dialing=20.0, round_trip=0.1)
"""Checks that take less than a second, for a launch. A host that does not answer in time causes no
finding: a real problem shows when the host is prepared."""


def gather_order(
    plan: LaunchPlan, part: HostPlan, depth: Depth, *, token: str, workdir: str
) -> GatherOrder:
    """The order to gather facts on one host. ``workdir`` is the job's working folder there, and
    ``token`` identifies the hosts of this check to each other."""
    job, thorough = plan.job, depth.thorough
    own = part.processes[0].environment if part.processes else {}
    left_out = set() if part.host.gpus else {"gpus"}
    # The program and its interpreter may be in the image.
    left_out |= {"container"} if job.container is None else {"interpreter"}
    if job.setup and not thorough:
        # The setup lines may choose the interpreter and provide the script.
        left_out |= {"interpreter", "script"}
    probes = [probe for probe in depth.probes if probe not in left_out]
    rendezvous = job.rendezvous
    draws = rendezvous.port is None and bool(part.ports)
    return {
        "op": "gather",
        "host": part.host.name,
        "token": token,
        "probes": probes,
        "ports": _ports(plan, part) if thorough else list(part.ports),
        "draw": [*rendezvous.ports, len(part.ports)] if draws else None,
        "addresses": {other.host.name: other.host.address for other in _named(plan, part, depth)},
        "folders": {
            "cluster.run_dir": plan.run_dir,
            "job.workdir": workdir,
            "shm": "/dev/shm",  # noqa: S108 - a file system to check, not a file
            "/tmp": "/tmp",  # noqa: S108
        },
        "own_folders": {
            "cluster.run_dir": f"{plan.run_dir}/nodes",
            **({"job.workdir": f"{workdir.rstrip('/')}.dtrain"} if job.sync else {}),
        },
        "trust_group": plan.trust_group,
        "workdir": workdir,
        "script": plan.script_on_host,
        "shell_script": plan.shell_script,
        "container": asdict(job.container) if job.container else None,
        "code": thorough and job.sync is None and job.workdir is not None,
        "setup": list(job.setup) if thorough else [],
        "environment": for_a_check({**part.environment, **own}),
        "python": part.python,
        "interpreter": {
            "code": programs.bundled_text("interpreter"),
            "limit": depth.interpreter,
            "copy": not thorough,
            "options": {
                "framework": job.framework,
                "import": thorough,
                "packages": thorough,
                # What comes with the launch is not on the host yet.
                "module": None if job.sync or _shipped(job.module) else job.module,
                "program": _program(job),
            },
        },
    }


def _program(job: Job) -> str | None:
    """The program of ``job.command``, if it is already on the hosts and has no placeholder."""
    program = job.command[0] if job.command else ""
    comes = job.sync is not None and "/" in program
    return None if comes or not program or program[0] == "~" or "{" in program else program


def _shipped(module: str | None) -> bool:
    """Whether each launch sends ``module`` to the hosts: a part of `dtrain.runtime`."""
    return module is not None and module.startswith("dtrain.runtime.")


def peers(hosts: Sequence[_Host], place: int, depth: Depth) -> list[_Host]:
    """The hosts that the host at ``place`` looks at: all others, beginning with the next one. In a
    quick check of a large cluster, the hosts 1, 2, 4, 8, … places further, and the first, where all
    ranks meet: the work of a host must not grow with the cluster."""
    others = [*hosts[place + 1 :], *hosts[:place]]
    if depth.thorough or len(hosts) <= ALL_PAIRS:
        return others
    chosen = {2**power - 1 for power in range(len(others).bit_length())}
    chosen.add(len(others) - place)
    return [other for at, other in enumerate(others) if at in chosen]


def _named(plan: LaunchPlan, part: HostPlan, depth: Depth) -> list[HostPlan]:
    """The hosts whose names a host looks up, in order: the first has a part in another check."""
    if depth.thorough or len(plan.hosts) <= ALL_PAIRS:
        return list(plan.hosts)
    found = [part, *peers(plan.hosts, part.node_rank, depth)]
    return sorted(found, key=lambda one: one.node_rank)


def _ports(plan: LaunchPlan, part: HostPlan) -> list[int]:
    """The host's ports, and both ends of the range for random ports: a firewall may open only
    part of it."""
    rendezvous = plan.job.rendezvous
    drawn = part.ports and rendezvous.port is None
    return sorted({*part.ports, *(rendezvous.ports if drawn else ())})


def for_a_check(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker without the tag by which hosts find the processes of a run."""
    return {name: value for name, value in environment.items() if name != "DTRAIN_RUN_ID"}
