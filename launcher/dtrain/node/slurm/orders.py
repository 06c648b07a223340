"""The orders of the launcher to the Slurm program: lines of JSON, distinguished by ``op``.

The first is a `SubmitOrder`, a `FollowOrder`, a `LookOrder` or an `EndOrder`; then any `LaterOrder`
may follow. `dtrain.messages.slurm` has the answers.

Not shipped: the launcher imports it, and the type checks of the modules that run on nodes.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from dtrain.node.agent.commands import Ping


class SlurmJobOrder(TypedDict):
    """What every first order has."""

    run: str
    run_dir: str
    """Like all paths, it starts at the home folder."""
    allocation: str | None
    """The number of the job in whose allocation the script runs at once."""


class WatchOrder(TypedDict):
    """For `dtrain.node.slurm.watchers`."""

    nodes: int
    world_size: int
    folder: str
    start: str
    """The line for ``sh`` that starts a program."""


class OutputFiles(TypedDict):
    outputs: str
    """The folder of the attempt, beside that of the run."""
    roles: dict[str, int]
    """The number of processes of each role, which have output files."""
    torchruns: dict[str, tuple[int, int]]
    """The first rank of each torchrun, and the number of its ranks: each has an output file."""
    watch: WatchOrder


class Submission(SlurmJobOrder):
    """Save the script and submit it from the working folder, unless the run was submitted before.
    Then do what `FollowOrder` does."""

    op: Literal["submit"]
    trust_group: str | None
    """A Unix group whose members may own the run's folder and write to the folders above it."""
    workdir: str
    code: str | None
    """The folder whose Git commit is reported, relative to ``workdir``."""
    script: str
    options: list[str]
    """Options of sbatch, which are in the script, too."""
    runtime: str
    """A zip archive in base64 that is saved as ``runtime.zip``."""
    environment: dict[str, str]
    """The job gets it, and this program's own variables without those in ``hidden``."""
    hidden: list[str]


class SubmitOrder(Submission, OutputFiles):
    pass


class Following(SlurmJobOrder):
    """Report the job and the output files of its machines, each from its offset."""

    op: Literal["follow"]
    job: str | None
    """If null, find the job of the run."""
    offsets: dict[str, dict[str, int]]
    """{host: {name: offset}}"""


class FollowOrder(Following, OutputFiles):
    pass


class LookOrder(SlurmJobOrder):
    """Report the job once, and end."""

    op: Literal["look"]
    job: str | None


class EndOrder(SlurmJobOrder):
    """Kill the job, report it once, and end."""

    op: Literal["end"]
    job: str | None


class Cancel(TypedDict):
    op: Literal["cancel"]
    kill: bool
    """With KILL at once."""


class StacksOfMachine(TypedDict):
    """The watcher of a machine collects stacks, see `dtrain.node.agent.commands.Stacks`."""

    op: Literal["stacks"]
    host: str
    abort: bool
    ras: bool


class Fail(TypedDict):
    """Kill the processes of the job."""

    op: Literal["fail"]
    restart: bool
    """If false, the job does not start again."""


class Finish(TypedDict):
    """The job is over: send the rest of its output, and end."""

    op: Literal["finish"]


FirstOrder = SubmitOrder | FollowOrder | LookOrder | EndOrder
LaterOrder = Cancel | StacksOfMachine | Fail | Finish | Ping
