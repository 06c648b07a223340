"""The commands of the launcher to a relay: lines of JSON, distinguished by ``op``.

The first is a `LaunchRequest`, an `AttachRequest` or a `LookRequest`; then any `Command` may
follow. `dtrain.messages.agent` has the answers.

Not shipped: the launcher imports it, and the type checks of the modules that run on nodes.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Union


class RunRequest(TypedDict):
    """What every first command has."""

    protocol: int
    run: str
    host: str
    run_dir: str
    trust_group: str | None
    """A Unix group whose members may own the job's folders and write to them."""
    containers: dict[str, Any] | None
    """The containers of all processes: program, prefix, left_out, waits, remove."""
    interval: float
    """Seconds between two reads of the workers' output."""


class ProcessRequest(TypedDict):
    role: str
    index: int
    rank: int | None
    ranks: int
    container: list[list[str | dict[str, str]]]
    """The words in front of ``argv``: each a list of texts and {node: what the node puts there},
    see `dtrain.launchplan.container`."""
    argv: list[str]
    environment: dict[str, str]
    node_variables: dict[str, dict[str, Any]]
    bound_to_gpus: list[int]
    """The process is bound to the NUMA node of these GPUs, see `dtrain.node.numa`."""


class LaunchRequest(RunRequest):
    """Check everything, and start nothing."""

    op: Literal["launch"]
    workdir: str
    script: str | None
    code: str | None
    """The folder whose Git commit the host reports, relative to ``workdir``."""
    python: str | None
    setup: list[str]
    environment: dict[str, str]
    node_variables: dict[str, dict[str, Any]]
    """Variables whose values the node completes: {name: {value, kind, place, instead}}, see
    `dtrain.launchplan.environment`."""
    secrets: dict[str, str]
    world_size: int
    processes: list[ProcessRequest]
    ports: list[int]
    job_ports: list[int]
    """The ports of the job on all hosts."""
    grace: float
    on_disconnect: str
    lease: float


class SupervisorRequest(LaunchRequest):
    """What the relay passes on to the supervisor."""

    absolute_workdir: str
    folder: str
    """The run's folder."""
    created: list[str]
    """The folders that a launch that is undone removes."""


class AttachRequest(RunRequest):
    """Follow a run that was launched before."""

    op: Literal["attach"]
    offsets: dict[str, int]
    """Each stream (``events`` and progress files too) is sent from its offset, or from its
    beginning, and averages after the time ``telemetry``."""
    outputs: bool
    """If false, only events are sent."""
    previous: int | None
    """The process id of a relay of this launcher that no longer answers: it is killed."""


class LookRequest(RunRequest):
    """Report the state of a run that was launched before, and end."""

    op: Literal["look"]


FirstCommand = Union[LaunchRequest, AttachRequest, LookRequest]


class Start(TypedDict):
    """Start the processes of a launch that is prepared."""

    op: Literal["start"]


class Abort(TypedDict):
    """Undo a launch; once it has started, the same as `Kill`."""

    op: Literal["abort"]


class Stop(TypedDict):
    """TERM, ``grace`` seconds, KILL. A later stop may only shorten the wait."""

    op: Literal["stop"]
    grace: float
    reason: str


class Kill(TypedDict):
    """KILL at once."""

    op: Literal["kill"]


class Stacks(TypedDict):
    """Report the stack of every worker, and of every rank of a torchrun. NCCL's flight recorders
    write dumps if their process groups accept requests."""

    op: Literal["stacks"]
    abort: bool
    """Processes that py-spy cannot read get SIGABRT: Python then writes its stack to stderr if
    PYTHONFAULTHANDLER is set."""
    ras: bool
    """NCCL is queried, see `dtrain.node.agent.nccl_ras`."""


class Ping(TypedDict):
    """Shows that a launcher is connected, as every command does. The relay answers ``alive`` and
    forwards the ping to the supervisor, which answers the relay with ``pong``."""

    op: Literal["ping"]


Command = Union[Start, Abort, Stop, Kill, Stacks, Ping]
