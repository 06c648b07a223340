"""The launch plan: the processes on each host, with their environment.

A launch executes the plan, and a dry run shows it. `build` is pure: the same cluster file gives
the same plan on every machine at any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import PurePath

from dtrain.environ import devices, jax, ranks, tf_config, torchrun, tpu
from dtrain.environ.placement import is_service, trains
from dtrain.environ.template import Slot, Template, number
from dtrain.launchplan import container, names
from dtrain.launchplan.environment import (
    Launched,
    NodeVariable,
    chosen_variables,
    host_environment,
    host_variables,
    placeholders,
    process_environment,
    process_variables,
)
from dtrain.launchplan.pods import object_name, pod_address, pod_names
from dtrain.records import dataclass
from dtrain.spec.model import ClusterFile, Container, Host, Job, Kubernetes, Slurm
from dtrain.spec.placeholders import fill_all
from dtrain.spec.tasks import tasks_listen, tensorflow_tasks

CODE = "/dtrain/code"
"""Folder in a pod that ``job.sync`` fills."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process that dtrain starts on a host."""

    role: str
    """``worker``, ``chief``, ``ps``, ``evaluator``, or ``torchrun`` for torchrun itself."""
    index: int
    """Index in this role over the whole job; for a torch worker, its global rank."""
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables of this process. They override the host's environment."""
    rank: int | None = None
    """Global rank, if this process is one rank."""
    ranks: int = 1
    """Number of worker processes that it runs: more than one for torchrun."""
    service: bool = False
    """Runs until the other processes finish, and is then stopped (parameter servers)."""
    node_variables: Mapping[str, NodeVariable] = field(default_factory=dict)
    """Variables that the node adds for this process. They override the host's."""
    bound_to_gpus: tuple[int, ...] = ()
    """The node binds the process to the NUMA node of these GPUs, if they share one."""
    container: tuple[str, ...] = ()
    """The words in front of ``argv`` that run it in a container."""

    @property
    def name(self) -> str:
        return names.process_name(self.role, self.index)

    @property
    def label(self) -> str:
        return names.label(self.role, self.index, self.rank)


@dataclass(frozen=True, slots=True)
class HostPlan:
    """One host's part of the launch."""

    host: Host
    node_rank: int
    environment: Mapping[str, str]
    """Shared by all processes of the host."""
    processes: tuple[Process, ...]
    workdir: str
    """Working folder of the processes: absolute, relative to ``~``, or (on this machine) relative
    to the cluster file."""
    ports: tuple[int, ...] = ()
    """TCP ports that the host's processes will listen on."""
    node_variables: Mapping[str, NodeVariable] = field(default_factory=dict)
    """Variables that the node adds to the environment."""
    python: str = "python3"
    """The Python interpreter of its processes."""
    enclosure: container.Enclosure | None = None
    """The containers in which its processes run."""

    def workdir_from(self, base: PurePath) -> str:
        """The working folder on the host. ``base`` is the cluster file's folder."""
        local = self.host.transport == "local" and not self.workdir.startswith("~")
        return str(base / self.workdir) if local else self.workdir

    @property
    def interface_variables(self) -> Mapping[str, NodeVariable]:
        """The node variables that become the name of a network interface."""
        every = self.node_variables.items()
        return {name: variable for name, variable in every if variable.kind == "interface"}


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A whole launch. ``hosts`` is in node-rank order."""

    name: str
    hosts: tuple[HostPlan, ...]
    job: Job
    run_dir: str
    """Folder on each node that contains the run's folder."""
    trust_group: str | None = None
    """Unix group on each node whose members may own and write to the job's folders."""
    run: str | None = None
    """The run's unique name; ``None`` in a dry run."""
    slurm: Slurm | None = None
    """Set if Slurm allocates the hosts. Their names and addresses, and the numbers of processes,
    are then shell expansions (see `dtrain.environ.template`)."""
    kubernetes: Kubernetes | None = None
    """Set if the hosts are pods on Kubernetes. Their names are then known, and the environment has
    shell expansions as on Slurm."""

    attempt: int = 1
    world_size: int = field(init=False, compare=False)
    """Worker processes in the whole job."""

    def __post_init__(self) -> None:
        size = sum(process.ranks for host in self.hosts for process in host.processes)
        object.__setattr__(self, "world_size", size)

    @property
    def host_names(self) -> tuple[str, ...]:
        return tuple(part.host.name for part in self.hosts)

    @property
    def hosts_known(self) -> bool:
        """Whether the hosts have names: an engine may choose them only when the job starts."""
        return not isinstance(self.hosts[0].host.name, Template)

    def on(self, hosts: Sequence[str]) -> LaunchPlan:
        """The plan on the hosts that an engine chose, in node-rank order."""
        named = zip(self.hosts, hosts, strict=True)
        parts = (replace(part, host=replace(part.host, name=name)) for part, name in named)
        return replace(self, hosts=tuple(parts))

    def agent_python(self, part: HostPlan) -> str:
        """The interpreter for dtrain's agent on a host: the interpreter of the job's processes, or
        ``python3`` if setup lines may change ``PATH`` or the processes run in a container."""
        hidden = self.job.container or (self.job.setup and "/" not in part.python)
        return "python3" if hidden else part.python

    @property
    def script_on_host(self) -> str | None:
        """The script, if the hosts have it: an absolute path may be one inside an image."""
        script = self.job.script
        return None if self.job.container and script and script.startswith("/") else script


def build(
    spec: ClusterFile,
    *,
    run: str | None = None,
    port: int | None = None,
    attempt: int = 1,
    local_python: str = "",
) -> LaunchPlan:
    """The launch plan of a cluster file.

    A launch passes the unique name of the ``run``, its ``port``, the number of the ``attempt``, and
    the interpreter to use for ``python3`` on this machine.
    """
    launched = Launched.of(spec, run, port, attempt)
    if spec.cluster.allocated:
        spec = _to_allocate(spec, run)
    if spec.job.container is not None:  # the image has its own interpreter
        local_python = ""
    if spec.job.framework == "tensorflow":
        hosts = _tensorflow(spec, launched, local_python)
    else:
        hosts = _ranks(spec, launched, local_python)
    if spec.job.container is not None:
        hosts = (_in_containers(spec.job, spec.job.container, part) for part in hosts)
    cluster = spec.cluster
    plan = LaunchPlan(
        spec.name,
        tuple(hosts),
        spec.job,
        cluster.run_dir,
        cluster.trust_group,
        run,
        cluster.slurm,
        cluster.kubernetes,
        attempt,
    )
    return plan if cluster.kubernetes is None else plan.on(pod_names(len(plan.hosts)))


def _to_allocate(spec: ClusterFile, run: str | None) -> ClusterFile:
    """``spec`` with shell expansions in place of the hosts' names and addresses: ``dtrain_hosts``
    and ``dtrain_addresses`` are arrays in node-rank order. A process uses the name of its own host
    only, and the address of any."""
    hosts = []
    for node_rank, host in enumerate(spec.cluster.hosts):
        address = host.address
        if spec.cluster.kubernetes is not None:
            address = pod_address(object_name(spec.name, run), node_rank)
        hosts.append(
            replace(
                host,
                name=Template(Slot(host.name, "${dtrain_hosts[dtrain_node_rank]}")),
                address=Template(Slot(address, f"${{dtrain_addresses[{node_rank}]}}")),
            )
        )
    return replace(spec, cluster=replace(spec.cluster, hosts=tuple(hosts)))


def _ranks(spec: ClusterFile, launched: Launched, local_python: str) -> Iterator[HostPlan]:
    job, hosts = spec.job, spec.cluster.hosts
    world = ranks.World(
        launched.run,
        tuple(1 if job.per == "host" else host.workers for host in hosts),
        hosts[0].address,
        launched.port,
        launched.restarts,
        launched.scripted,
    )
    gpus = sum(host.workers for host in hosts)
    for node_rank, host in enumerate(hosts):
        python = _python(host, local_python)
        values = placeholders(spec, launched, node_rank, world.size, gpus)
        processes: tuple[Process, ...]
        if job.framework == "torch" and job.rendezvous.backend != "direct":
            identity = torchrun.threads(world.ranks_by_node[node_rank])
            if job.rendezvous.backend == "static":  # c10d numbers the nodes itself
                identity |= ranks.nodes(world, node_rank)
            processes = (_torchrun(spec, world, node_rank, python, values),)
        else:
            identity = _identity(job, world, node_rank)
            processes = tuple(
                _rank(spec, world, node_rank, local_rank, python, values)
                for local_rank in range(world.ranks_by_node[node_rank])
            )
        environment = host_environment(spec, host, launched, identity, values)
        processes = tuple(_bound(spec, process, environment) for process in processes)
        route_to = None
        # The host name of a pod resolves to the address of the pod, so Gloo finds the interface.
        torch = job.framework == "torch" and spec.cluster.kubernetes is None
        if torch and len(hosts) > 1 and "GLOO_SOCKET_IFNAME" not in environment:
            route_to = hosts[0 if node_rank else 1].address
            if world.scripted:
                other = "${dtrain_addresses[dtrain_node_rank == 0]}"
                route_to = Template(Slot(route_to, other))
        yield HostPlan(
            host,
            node_rank,
            environment,
            processes,
            _workdir(spec, host),
            (int(launched.port),) if node_rank == 0 else (),
            host_variables(job, environment, route_to, python),
            python,
        )


def _identity(job: Job, world: ranks.World, node_rank: int) -> dict[str, str]:
    """Variables that are the same for all ranks of a node."""
    if job.framework == "torch":
        return torchrun.node_environment(world, node_rank)
    shared = ranks.node_environment(world, node_rank)
    return shared | jax.node_environment(world) if job.framework == "jax" else shared


def _rank(
    spec: ClusterFile,
    world: ranks.World,
    node_rank: int,
    local_rank: int,
    python: str,
    values: Mapping[str, str],
) -> Process:
    job, host = spec.job, spec.cluster.hosts[node_rank]
    rank = world.first_rank(node_rank) + local_rank
    environment = ranks.rank_environment(world, node_rank, local_rank)
    if job.framework == "torch":
        environment = torchrun.rank_environment(world, node_rank, local_rank)
    elif job.framework == "jax":
        devices_of_host = len(host.gpus) if job.per == "host" else None
        environment |= jax.rank_environment(world, node_rank, local_rank, devices_of_host)
    values = {
        **values,
        "rank": world.rank(node_rank, local_rank),
        "local_rank": world.local_rank(local_rank),
    }
    return Process(
        role="worker",
        index=rank,
        rank=rank,
        argv=fill_all(_program(job, python), values),
        environment=environment | process_environment(job, host, values),
        node_variables=process_variables("worker", rank, scripted=world.scripted),
    )


def _torchrun(
    spec: ClusterFile, world: ranks.World, node_rank: int, python: str, values: Mapping[str, str]
) -> Process:
    job, host = spec.job, spec.cluster.hosts[node_rank]
    backend = job.rendezvous.backend
    assert backend != "direct"  # noqa: S101 (types)
    address = host.address
    if world.scripted:
        address = Template(Slot(address, "${dtrain_addresses[dtrain_node_rank]}"))
    options = torchrun.torchrun_arguments(world, node_rank, address, backend)
    program = _program(job, python)
    program = program[1:] if program[0] == python else ("--no-python", *program)
    return Process(
        role="torchrun",
        index=node_rank,
        ranks=world.ranks_by_node[node_rank],
        argv=(python, "-m", "torch.distributed.run", *options, *fill_all(program, values)),
        environment=_torchrun_logs(spec),
        node_variables=process_variables("torchrun", node_rank, scripted=world.scripted),
    )


def _torchrun_logs(spec: ClusterFile) -> Mapping[str, str]:
    if spec.cluster.kubernetes is not None:
        return {}  # A pod has one log: torchrun's own output, with that of its ranks.
    return torchrun.LOGS_OF_RANKS if spec.cluster.slurm is not None else torchrun.LOGS


def _tensorflow(spec: ClusterFile, launched: Launched, local_python: str) -> Iterator[HostPlan]:
    job, hosts = spec.job, spec.cluster.hosts
    placed, scripted = tensorflow_tasks(spec), launched.scripted
    listening: Counter[str] = Counter()
    tasks: list[tf_config.TensorFlowTask] = []
    for role, index, on in placed:
        # Hosts with the same address are one machine and share its ports.
        address = hosts[on].address
        tasks.append(
            tf_config.TensorFlowTask(role, index, address, launched.later_port(listening[address]))
        )
        listening[address] += 1
    shared, own = _tensorflow_identity(spec, tasks)
    all_gpus = sum(host.workers for host in hosts)
    for node_rank, host in enumerate(hosts):
        mine = [task for task, (_, _, on) in zip(tasks, placed, strict=True) if on == node_rank]
        gpus = _gpus_by_task(mine, job.roles, host)
        chosen = chosen_variables(job, host)
        python = _python(host, local_python)
        values = placeholders(spec, launched, node_rank, len(tasks), all_gpus)
        numbered = {
            task: {
                **values,
                "rank": number("rank", tasks.index(task), scripted=scripted),
                "local_rank": number("local_rank", local_rank, scripted=scripted),
            }
            for local_rank, task in enumerate(mine)
        }
        processes = tuple(
            Process(
                role=task.role,
                index=task.index,
                argv=fill_all(_program(job, python), numbered[task]),
                environment=_unless(chosen, devices.visible_devices(gpus[task], scripted=scripted))
                | own(task)
                | process_environment(job, host, numbered[task]),
                service=is_service(task.role, job.roles),
                node_variables=process_variables(task.role, task.index, scripted=scripted),
            )
            for task in mine
        )
        environment = host_environment(spec, host, launched, shared, values)
        yield HostPlan(
            host,
            node_rank,
            environment,
            tuple(_bound(spec, process, environment) for process in processes),
            _workdir(spec, host),
            tuple(int(task.port) for task in mine) if tasks_listen(job) else (),
            host_variables(job, environment, None, python),
            python,
        )


def _tensorflow_identity(
    spec: ClusterFile, tasks: list[tf_config.TensorFlowTask]
) -> tuple[dict[str, str], Callable[[tf_config.TensorFlowTask], dict[str, str]]]:
    """The variables by which tasks find each other: those that all tasks share, and a function that
    returns those of one task."""
    if spec.job.strategy == "tpu":
        addresses = [host.address for host in spec.cluster.hosts]
        if len(addresses) == 1:
            return {}, lambda _task: {}
        shared = tf_config.direct_connections(addresses) | tpu.coordinator_environment(addresses)
        return shared, lambda _task: {}
    if not tasks_listen(spec.job):
        return {}, lambda _task: {}
    cluster, scripted = tf_config.tf_cluster(tasks), spec.cluster.allocated
    return (
        tf_config.direct_connections([task.address for task in tasks]),
        lambda task: {"TF_CONFIG": tf_config.tf_config(cluster, task, scripted=scripted)},
    )


def _gpus_by_task(
    tasks: list[tf_config.TensorFlowTask], roles: Mapping[str, int], host: Host
) -> dict[tf_config.TensorFlowTask, tuple[int, ...]]:
    """The GPUs of a host, divided among its tasks that train. An evaluator gets them only if no
    task trains there."""
    wanting = [task for task in tasks if trains(task.role, roles)]
    wanting = wanting or [task for task in tasks if task.role == "evaluator"]
    shares = devices.split(host.gpus, len(wanting)) if wanting else []
    return dict.fromkeys(tasks, ()) | dict(zip(wanting, shares, strict=True))


def _in_containers(job: Job, image: Container, part: HostPlan) -> HostPlan:
    """``part`` with each of its processes in a container."""
    # The image has a PATH of its own.
    shared = {name: value for name, value in part.node_variables.items() if name != "PATH"}
    workers = [
        container.ContainerProcess(
            name=Template("dtrain-", part.environment["DTRAIN_RUN_ID"], f"-{process.name}"),
            environment={**part.environment, **process.environment},
            others=(*shared, *process.node_variables, *job.secrets, "USER", "LOGNAME"),
            gpus=bool(part.host.gpus),
        )
        for process in part.processes
    ]
    return replace(
        part,
        processes=tuple(
            replace(process, container=container.command(image, worker))
            for process, worker in zip(part.processes, workers, strict=True)
        ),
        node_variables=shared,
        enclosure=container.enclosure(image, workers),
    )


def _unless(chosen: Collection[str], environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without the variables that the cluster file has chosen."""
    return {name: value for name, value in environment.items() if name not in chosen}


def _bound(spec: ClusterFile, process: Process, environment: Mapping[str, str]) -> Process:
    """The process, with the GPUs whose NUMA node it is bound to. ``environment`` is the host's."""
    job = spec.job
    # Slurm and docker's daemon start the processes themselves.
    by_daemon = job.container is not None and job.container.engine == "docker"
    if job.binding == "none" or spec.cluster.allocated or by_daemon:
        return process
    own = {**environment, **process.environment}
    # A process that is one rank uses one GPU. torchrun and a TensorFlow task use all they see.
    one_gpu = process.rank is not None and job.per == "gpu"
    local_rank = int(own["LOCAL_RANK"]) if one_gpu else None
    return replace(process, bound_to_gpus=devices.chosen_gpus(own, local_rank))


def _program(job: Job, python: str) -> tuple[str, ...]:
    if job.command:
        return (*job.command, *job.args)
    if job.module is not None:
        return (python, "-m", job.module, *job.args)
    script = job.script or ""
    if script.startswith("-"):  # Python would read it as an option
        script = f"./{script}"
    return ("bash" if script.endswith(".sh") else python, script, *job.args)


def _python(host: Host, local_python: str) -> str:
    if host.transport == "local" and host.python == "python3":
        return local_python or host.python
    return host.python


def _workdir(spec: ClusterFile, host: Host) -> str:
    workdir = spec.job.workdir
    if spec.cluster.kubernetes is not None:
        return workdir or (CODE if spec.job.sync is not None else ".")
    if workdir is None:
        if spec.job.sync is not None:
            return f"~/dtrain/{spec.name}"
        return "." if host.transport == "local" else "~"
    if host.transport == "local" or workdir.startswith(("/", "~")):
        return workdir
    return f"~/{workdir}"
