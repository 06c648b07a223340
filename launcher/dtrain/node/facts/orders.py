"""The orders of the launcher to the facts program: lines of JSON, distinguished by ``op``. Each is
answered before the next.

Not shipped: the launcher imports it, and the type checks of the modules that run on nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class ClockOrder(TypedDict):
    """Report the time."""

    op: Literal["clock"]


class Program(TypedDict):
    """A program that runs in the job's Python, see `dtrain.node.boot`."""

    code: str
    """With compiled code, in base64."""
    options: dict[str, Any]
    """Marshalled, they follow the program on its stream."""


class LimitedProgram(Program):
    limit: float
    """Seconds."""


class InterpreterProgram(LimitedProgram):
    copy: NotRequired[bool]
    """Whether a copy of the facts program may look in place of a new Python."""


class JobOrder(TypedDict):
    """How the job's Python is started."""

    any_owner: NotRequired[bool]
    """The working folder may have any owner."""
    script: NotRequired[str | None]
    workdir: str
    trust_group: str | None
    """A Unix group whose members may own the job's folders and write to them."""
    setup: list[str]
    environment: dict[str, str]
    python: str


class GatherOrder(JobOrder):
    """Report facts about the machine. Ports that are free stay open for other hosts to dial."""

    op: Literal["gather"]
    host: str
    shell_script: str | None
    """To search for launchers."""
    token: str
    """Identifies the hosts of this check to each other."""
    probes: list[str]
    ports: list[int]
    draw: list[int] | None
    """The first and the last port that a launch may draw instead, and how many it needs."""
    addresses: dict[str, str]
    """{host: address} of all hosts."""
    folders: dict[str, str]
    """{key of the cluster file: folder} to look at."""
    own_folders: dict[str, str]
    """Folders that dtrain creates."""
    container: dict[str, Any] | None
    """The fields of `dtrain.spec.model.Container`."""
    code: bool
    """Whether to report the version of the code in the working folder."""
    interpreter: InterpreterProgram


class SharedFile(TypedDict):
    path: str
    content: str


class StepOrder(GatherOrder):
    """For `dtrain.node.slurm.step`."""

    shared: SharedFile
    """A file that the login node has just written."""


class DialOrder(TypedDict):
    """Connect to ports of other hosts."""

    op: Literal["dial"]
    targets: Sequence[tuple[str, str, str, int, str | None]]
    """Host, kind, address, port, and the own address to connect from."""
    token: str
    limit: float
    """Seconds for each target."""


class RunOrder(JobOrder):
    """Close the ports, and run a program in the job's Python."""

    op: Literal["run"]
    program: Program
    limit: float
    """Seconds."""


Order = ClockOrder | GatherOrder | DialOrder | RunOrder
