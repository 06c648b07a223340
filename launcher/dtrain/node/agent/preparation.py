"""Checks and reserves everything that a run needs before it starts."""

from __future__ import annotations

import os

from dtrain.node.agent.containers import Containers
from dtrain.node.agent.environment import NodeVariables
from dtrain.node.agent.events import Events
from dtrain.node.agent.flight_recorder import FlightRecorders
from dtrain.node.agent.folder import (
    cannot_write,
    check_workdir,
    create,
    expand,
    open_run,
    save,
    trust_of,
)
from dtrain.node.agent.nccl_ras import address_in
from dtrain.node.agent.open_files import raise_limit, require_files
from dtrain.node.agent.ports import reserve_port
from dtrain.node.agent.ranks import Ranks
from dtrain.node.agent.spawn import search
from dtrain.node.agent.wire import RefusedError, encode, raw, shown
from dtrain.node.agent.worker import Worker
from dtrain.node.files import executable
from dtrain.node.numa import bindings

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

    from dtrain.node.agent.commands import LaunchRequest, ProcessRequest, SupervisorRequest
    from dtrain.node.agent.sweep import Tag
    from dtrain.node.agent.wire import Json


class Preparation:
    """The prepared run: its workers, reserved ports, events file and flight recorders.

    Raises RefusedError if the run cannot start on this host.
    """

    def __init__(self, request: SupervisorRequest, folder: bytes, workdir: bytes, tag: Tag) -> None:
        self._request, self._tag = request, tag
        self._folder, self._workdir = folder, workdir
        self.ports: list[socket.socket] = []
        """Bound until the run ends."""
        self.open_files = raise_limit()
        """The workers' limits of open files."""
        require_files(request)
        trust = trust_of(request)
        try:
            self.folder_fd = open_run(trust, folder)
        except OSError as error:
            raise cannot_write(error, folder) from None
        base = {name: value for name, value in os.environb.items() if name != b"DTRAIN_SETUP"}
        self._containers: Containers | None = None
        if containers := request["containers"]:
            # The host's own variables, such as PATH, mean nothing in an image.
            self._containers, base = Containers(containers, request, base, tag.environment), {}
        for source in (request["environment"], request["secrets"]):
            base.update({raw(name): raw(value) for name, value in source.items()})
        self._base = base
        self._variables = NodeVariables(folder, workdir)
        environment = self._environment(request)
        self.flights = FlightRecorders(environment, workdir, request["world_size"])
        self.ras_address = address_in(environment)
        self._python = self._find_python(request["python"], environment)
        script = request["script"]
        self._check_script(script)
        # After setup, which may change the folder.
        check_workdir(trust, workdir, script)
        for port in request["ports"]:
            self.ports += reserve_port(int(port))
        try:
            self.events = Events(self.folder_fd)
            self.workers = [self._worker(body) for body in request["processes"]]
        except OSError as error:
            raise cannot_write(error, folder) from None
        gpus = [body["bound_to_gpus"] for body in request["processes"]]
        for worker, binding in zip(self.workers, bindings(gpus, os.sched_getaffinity(0))):
            worker.binding = binding

    def save_record(self, record: Json) -> None:
        """Save the supervisor's record, by which relays find it."""
        save(b"supervisor", self.folder_fd, encode(record))

    def _environment(self, body: LaunchRequest | ProcessRequest) -> dict[bytes, bytes]:
        """The complete environment of a process, or what all processes share if ``body`` is the
        request."""
        given = {raw(name): raw(value) for name, value in body["environment"].items()}
        environment = {**self._base, **given}
        variables = {**self._request["node_variables"], **body["node_variables"]}
        self._variables.complete(environment, variables)
        # The launcher cannot override the tag, which identifies the processes of the run.
        environment.update(self._tag.environment)
        return environment

    def _find_python(self, python: str | None, environment: dict[bytes, bytes]) -> bytes | None:
        if python is None:
            return None
        wanted = expand(python) if python.startswith("~/") else raw(python)
        paths = [os.path.join(self._workdir, path) for path in search(wanted, environment)]
        for path in filter(executable, paths):
            return path
        where = "" if b"/" in wanted else " on PATH (%s)" % shown(environment.get(b"PATH", b""))
        exists = any(os.path.isfile(path) for path in paths)
        raise RefusedError(
            "python",
            "python %s %s%s"
            % (python, "is not executable" if exists else "not found", where or " on this host"),
            "set `cluster.python` to an interpreter of this host, or put it on PATH in `job.setup`",
        )

    def _check_script(self, script: str | None) -> None:
        if script is None or os.path.isfile(os.path.join(self._workdir, raw(script))):
            return
        where = "" if os.path.isabs(script) else " in %s" % shown(self._workdir)
        remedy = "set `job.workdir` to its folder on this host, or let `job.sync` send it"
        if os.path.isabs(script):
            remedy = "put it there, or let `job.sync` send it and name it without its folder"
        raise RefusedError("script", "script %s not found%s" % (script, where), remedy)

    def _worker(self, body: ProcessRequest) -> Worker:
        worker = Worker(body)
        worker.environment = self._environment(body)
        worker.argv = [raw(word) for word in body["argv"]]
        if self._python is not None and body["argv"][0] == self._request["python"]:
            worker.argv[0] = self._python
        if worker.role == "torchrun":
            path = os.path.join(self._folder, worker.name)
            count, world_size = body["ranks"], self._request["world_size"]
            worker.ranks = Ranks(path, worker.argv, count, world_size)
        if self._containers is not None:
            worker.contained = os.path.join(self._folder, worker.name + b".error.json")
            worker.argv = self._containers.argv(body["container"]) + worker.argv
            worker.environment = self._containers.environment(worker.environment)
        out = create(worker.name + b".out", self.folder_fd, os.O_APPEND)
        worker.outputs = out, create(worker.name + b".err", self.folder_fd, os.O_APPEND)
        return worker
