"""What a run was launched with, kept in its folder: enough to find its processes again.

<home>/runs/<run>/run.json
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Annotated, Any

from dtrain.diagnostics import DtrainError, UsageError
from dtrain.launchplan.build import build
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.agent import Time
from dtrain.messages.decode import Length, ProtocolError, Range, decode, excerpt
from dtrain.records import cached_property, dataclass
from dtrain.runs.folder import RunFolder
from dtrain.runs.request import Request
from dtrain.runs.restart import Retry
from dtrain.runs.storage import storing
from dtrain.runs.stored_file import RUN_NAME, read_object, write_object
from dtrain.runtime.layout_rules import MisfitError
from dtrain.spec.elastic import without
from dtrain.spec.model import ClusterFile

SCHEMA = 1
FILE = "run.json"
MAX_BYTES = 1 << 25


@dataclass(frozen=True)
class Record:
    """A run that has begun. It holds no secret: the file names secrets without their values."""

    run: Annotated[str, RUN_NAME]
    request: Request
    port: Annotated[int, Range(1, 65535)]
    """The rendezvous port, or the first port of the TensorFlow tasks."""
    local_python: str
    """The interpreter to use for ``python3`` on this machine."""
    started: Time
    attempt: Annotated[int, Range(1, 10**6)] = 1
    replaced: Mapping[str, str] = field(default_factory=dict)
    """Hosts of the file that are no longer used, each with the spare that took its rank."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Hosts that the job continues without, each with the first attempt without it."""
    leftovers: tuple[tuple[str, int], ...] = ()
    """Hosts that may still run processes of an attempt, each with the attempt's number."""
    job_id: Annotated[str, Length(64)] | None = None
    """The number that the engine gave the job; None for SSH, and before a submission."""
    allocated: tuple[str, ...] = ()
    """The hosts that the engine chose, in node-rank order; empty if the file names them, or if they
    are not known yet."""
    context: Annotated[str, Length(1 << 10)] | None = None
    """The context of the kubeconfig at the launch. The user may switch to another one later."""
    namespace: Annotated[str, Length(1 << 10)] | None = None
    """The namespace of the job on Kubernetes."""

    def spec(self) -> ClusterFile:
        """The file for this attempt: spares in place of the hosts they replace, without dropped
        hosts.

        Raises MisfitError if too few hosts are left for the layout.
        """
        spec = self.request.spec()
        cluster = spec.cluster
        spares = {host.name: host for host in cluster.spares}
        hosts = tuple(spares.get(self._now(host.name), host) for host in cluster.hosts)
        used = {host.name for host in hosts} | set(self.replaced)
        left = tuple(host for host in cluster.spares if host.name not in used)
        spec = replace(spec, cluster=replace(cluster, hosts=hosts, spares=left))
        gone = [host for host, since in self.dropped.items() if since <= self.attempt]
        return without(spec, gone) if gone else spec

    def _now(self, host: str) -> str:
        """The host that has the rank of a host of the file. Spares may be replaced, too."""
        while host in self.replaced:
            host = self.replaced[host]
        return host

    def fitting(self, decision: Retry, lost: Collection[str]) -> Retry:
        """The decision, adapted to the layout.

        If the layout needs hosts that are at fault but not ``lost``, they stay in use. Raises
        MisfitError if the layout needs hosts that are lost.
        """
        needed = replace(decision, dropped=tuple(host for host in decision.dropped if host in lost))
        try:
            self.after(decision).spec()
        except MisfitError:
            self.after(needed).spec()
            return needed
        return decision

    def after(self, decision: Retry) -> Record:
        """The record of the next attempt."""
        number = self.attempt + 1
        return replace(
            self,
            attempt=number,
            replaced={**self.replaced, **decision.replaced},
            dropped={**self.dropped, **dict.fromkeys(decision.dropped, number)},
        )

    @cached_property
    def plan(self) -> LaunchPlan:
        """The plan of this attempt. Raises MisfitError as `spec` does."""
        plan = build(
            self.spec(),
            run=self.run if self.attempt == 1 else f"{self.run}.{self.attempt}",
            port=self.port,
            attempt=self.attempt,
            local_python=self.local_python,
        )
        return plan.on(self.allocated) if self.allocated else plan

    def save(self, folder: Path) -> None:
        """Write, or replace, the folder's record; readers never see half of it. Raises
        StorageError."""
        with storing(folder):
            write_object(folder / FILE, {"schema": SCHEMA, **asdict(self)}, indent=1, durable=True)

    @classmethod
    def load(cls, folder: Path) -> Record:
        """Raises UsageError if the folder has no record that this version can read, and
        StorageError if another user can change the folder."""
        path = folder / FILE
        record = read_object(path, SCHEMA, MAX_BYTES, cls._read)
        if record is None:
            holder, hint = RunFolder(folder).holder(), ""
            # `dtrain stop` takes charge of a run before it reads the record.
            own = holder is not None and holder.pid == os.getpid()
            if holder is not None and holder.signals and not holder.elsewhere and not own:
                stop = f"`kill {holder.pid}` stops the job on all hosts"
                hint = f"its launcher still runs: {stop}; the output is in {folder}"
            raise UsageError(f"{path}: not found, so this run cannot be read", hint=hint)
        return record

    @classmethod
    def _read(cls, body: dict[str, Any]) -> Record:
        if "stray" in body:  # from an earlier version
            body["leftovers"] = body.pop("stray")
        record = decode(cls, body, "run")
        record._check()
        return record

    def _check(self) -> None:
        """Raises ProtocolError if fields contradict each other."""
        try:
            self.request.text.encode(errors="surrogateescape")
        except UnicodeEncodeError:
            raise ProtocolError("run.request.text: expected the bytes of a file") from None
        checked: set[str] = set()
        for host in self.replaced:
            path: set[str] = set()
            while host in self.replaced and host not in checked:
                if host in path:
                    raise ProtocolError(f"run.replaced: {excerpt(host)} replaces itself")
                path.add(host)
                host = self.replaced[host]
            checked |= path
        try:
            if not self.spec().cluster.hosts:
                raise ProtocolError("run.dropped: no host is left")
            cluster = self.request.spec().cluster
        except (DtrainError, MisfitError) as error:
            raise ProtocolError(f"its cluster file does not fit: {error}") from None
        if self.allocated and len(self.allocated) != len(cluster.hosts):
            raise ProtocolError("run.allocated: not one for each host")
        known = {host.name for host in (*cluster.hosts, *cluster.spares)}
        for host, _ in self.leftovers:
            if host not in known:
                raise ProtocolError(f"run.leftovers: no host {excerpt(host)} in its cluster file")


def run_name(job: str, begun: float) -> str:
    """A name for a run that began at ``begun``, in seconds since the epoch. Runs of a job sort by
    time, so the time is UTC, and names are unique across launching machines."""
    moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime(begun))
    return f"{job}-{moment}-{secrets.token_hex(3)}"
