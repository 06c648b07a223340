"""What the links of one attempt share."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Set
from dataclasses import field
from pathlib import Path

from dtrain.engines.ssh.host_events import Post
from dtrain.engines.ssh.inspection import Inspection
from dtrain.engines.ssh.outage import Contact
from dtrain.engines.ssh.readiness import Spares
from dtrain.launchplan.plan import LaunchPlan
from dtrain.records import dataclass
from dtrain.runs.folder import RunFolder
from dtrain.session.reporting.recorder import Recorder
from dtrain.session.watching.reports import ProgressReports
from dtrain.session.watching.steps import StepWatch
from dtrain.spec.model import Host
from dtrain.sync import Tree
from dtrain.transport.contract import Transport


@dataclass(frozen=True, slots=True)
class AttemptContext:
    """What the links of one attempt share."""

    plan: LaunchPlan
    movable_port: bool
    """Whether the launch tries another port if this one is busy."""
    base: Path
    """Folder of the cluster file. Relative working folders on this machine start here."""
    secrets: Mapping[str, str] = field(repr=False)
    transport: Transport
    tree: Tree | None
    folder: RunFolder
    recorder: Recorder
    inspection: Inspection | None
    """The checks of all hosts before the launch; None if they are off or done."""
    progress: ProgressReports
    """What the workers of this attempt report and print."""
    proven_hosts: Set[str] = frozenset()
    """Hosts on which an earlier attempt ran the job."""
    spares: Spares = field(default_factory=Spares)
    all_hosts: tuple[Host, ...] = ()
    """The hosts and spares of the cluster file, also those that this attempt does not use."""
    contact: Contact = field(default_factory=Contact)
    posts: queue.SimpleQueue[Post] = field(default_factory=queue.SimpleQueue)
    """What the attempt handles next."""

    @property
    def steps(self) -> StepWatch:
        return self.progress.steps
