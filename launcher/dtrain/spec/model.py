"""The cluster file as values: checked, defaults filled in, host lists unfolded.

Everything here is plain data. Text from the file stays unchanged: expanding paths, substituting
variables and resolving names depend on the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal, get_args

from dtrain.diagnostics import Problem
from dtrain.records import dataclass
from dtrain.runtime.layout import Layout, Training

Framework = Literal["torch", "tensorflow", "jax", "none"]
SuccessPolicy = Literal["all_hosts", "first_host"]
RendezvousBackend = Literal["direct", "static", "c10d"]
HostKeys = Literal["strict", "accept-new"]
TransportName = Literal["ssh", "local"]
NotifyEvent = Literal["failed", "done", "restarted"]
Notification = Literal[NotifyEvent, "unattended"]
"""What is sent. ``unattended`` goes to those who want ``failed``."""
EngineName = Literal["docker", "podman", "apptainer", "enroot", "pyxis"]

LAUNCH_ROLES = ("chief", "worker", "ps", "evaluator")
"""TensorFlow's task types, in the order in which tasks are placed on hosts."""


@dataclass(frozen=True, slots=True)
class Ssh:
    """How to reach hosts by SSH. ``None`` leaves the choice to ``~/.ssh/config``."""

    user: str | None = None
    port: int | None = None
    identity: str | None = None
    jump: str | None = None
    known_hosts: str | None = None
    host_keys: HostKeys = "strict"
    config: str | None = None
    connect_timeout: float = 15.0
    """Seconds for one attempt to connect and authenticate."""


@dataclass(frozen=True, slots=True)
class Host:
    """One machine, with the cluster's defaults and its own overrides merged."""

    name: str
    address: str
    """IP address or name by which the other hosts reach it. Defaults to ``name``."""
    transport: TransportName = "ssh"
    gpus: tuple[int, ...] = ()
    """CUDA device indices that the job may use; empty for a CPU host."""
    gpu: str | None = None
    """Name of its GPUs in the planner's hardware table."""
    slots: int = 1
    """Worker processes on a CPU host; on a GPU host there is one for each GPU."""
    interface: str | None = None
    """Network interface for collectives, e.g. ``ib0``."""
    python: str = "python3"
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of this host only. They override ``job.env``."""
    ssh: Ssh = Ssh()

    @property
    def workers(self) -> int:
        """Worker processes under one-process-per-device strategies."""
        return len(self.gpus) or self.slots


@dataclass(frozen=True, slots=True)
class Slurm:
    """What a job asks of Slurm. ``None`` leaves the choice to Slurm."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    time: float | None = None
    """Time limit in seconds."""
    gpu_type: str | None = None
    """Type of the GPUs, as GRES names it."""
    cpus: int | None = None
    """CPUs of each process."""
    login: str | None = None
    """Where to submit the job, over SSH; ``None`` is this machine."""
    options: tuple[str, ...] = ()
    """Further options of sbatch."""


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """What a job asks of Kubernetes. ``None`` leaves the choice to the cluster. The rules of each
    text are in `dtrain.spec.kubernetes_keys`."""

    image: str
    context: str | None = None
    namespace: str | None = None
    api: Literal["jobset", "trainjob"] = "jobset"
    runtime: str = "torch-distributed"
    queue: str | None = None
    topology: str | None = None
    priority: str | None = None
    gpu_vendor: Literal["nvidia", "amd"] = "nvidia"
    resources: Mapping[str, str] = field(default_factory=dict)
    """Further resources of each pod, as Kubernetes quantities."""
    shm: str | None = None
    host_network: bool = False
    claims: tuple[str, ...] = ()
    """``CLAIM:FOLDER[:ro]``; neither name has a colon."""
    host_paths: tuple[str, ...] = ()
    """``FOLDER:FOLDER[:ro]``."""
    service_account: str | None = None
    pull_secrets: tuple[str, ...] = ()
    tolerations: tuple[str, ...] = ()
    """``KEY``, ``KEY:EFFECT`` or ``KEY=VALUE:EFFECT``."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    run_as_user: int | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    hosts: tuple[Host, ...]
    """In node-rank order; never empty. With ``slurm`` or ``kubernetes``, all are equal, and their
    names are placeholders for the hosts that the engine chooses."""
    slurm: Slurm | None = None
    kubernetes: Kubernetes | None = None
    spares: tuple[Host, ...] = ()
    tpu: str | None = None
    """Topology of the TPU slice that the hosts form: chips along each axis, e.g. ``4x4``."""
    gbps: float | None = None
    """Network bandwidth of one host, all NICs together, in gigabits per second."""
    run_dir: str = "~/.dtrain"
    """Folder on each node for the logs and the state of runs."""
    trust_group: str | None = None
    """Unix group on each node whose members may own and write to the job's folders."""

    @property
    def allocated(self) -> bool:
        """Whether the engine chooses the hosts when the job starts."""
        return self.slurm is not None or self.kubernetes is not None


@dataclass(frozen=True, slots=True)
class Sync:
    source: str = "."
    """Folder on the launching machine, relative to the cluster file."""
    exclude: tuple[str, ...] = (".git", "__pycache__", ".venv", "*.pyc")
    """Patterns of `dtrain.sync.exclude`. A list in the file replaces the default."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    backend: RendezvousBackend = "direct"
    port: int | None = None
    """``None``: each launch chooses a free port from ``ports``."""
    ports: tuple[int, int] = (29500, 30523)
    """The first and the last port that a launch may choose."""

    @property
    def first_port(self) -> int:
        """The port in a dry run."""
        return self.ports[0] if self.port is None else self.port

    def first_ports(self, needed: int) -> range:
        """The ports from ``ports`` that can be the first of ``needed`` consecutive ones. Never
        empty."""
        low, high = self.ports
        return range(low, max(low, high - needed + 1) + 1)


@dataclass(frozen=True, slots=True)
class Restart:
    max: int = 0
    node_timeout: float = 300.0
    """Seconds after which a host that cannot be reached counts as lost."""


@dataclass(frozen=True, slots=True)
class Elastic:
    """Continue on fewer hosts if no spare is left."""

    min_hosts: int


@dataclass(frozen=True, slots=True)
class PrintedSteps:
    """The progress that the program prints. The keys are those of `job.progress`."""

    line: tuple[str, ...]
    """See `dtrain.spec.progress_line`."""
    total: int | None = None
    """Planned steps, if the line does not have them."""


@dataclass(frozen=True, slots=True)
class Watchdog:
    """What to do with a job that hangs."""

    silence: float | None = None
    """Longest time without output or progress from any worker, in seconds; ``None``: no limit."""
    then: Literal["report", "stop", "restart"] = "stop"


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder or file of the host that a container sees."""

    source: str
    """Absolute, or relative to the home folder on the host (``~/``)."""
    target: str
    """Absolute, inside the container; or as ``source``."""
    read_only: bool = False

    @classmethod
    def parse(cls, text: str) -> Mount:
        """From ``SOURCE[:TARGET][:ro]``, which `dtrain.spec.value_rules.mount` accepts."""
        words = text.split(":")
        read_only = words[-1] == "ro"
        source, *target = words[:-1] if read_only else words
        return cls(source, target[0] if target else source, read_only)


@dataclass(frozen=True, slots=True)
class Container:
    """The container in which each worker runs; the agent runs outside."""

    image: str
    engine: EngineName = "docker"
    mounts: tuple[Mount, ...] = ()
    options: tuple[str, ...] = ()
    """Further options of the engine's command."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the plan expects of the job. The keys are those of `job.expected`."""

    step_time: float | None = None
    """Seconds of one optimizer step."""
    compute_time: float | None = None
    """Seconds of a step in which a rank computes."""
    memory_gib: float | None = None
    """GiB of the fullest GPU at its peak, as the driver counts it."""
    gflop_per_token: float | None = None
    """10⁹ FLOPs of the model for one token, forward and backward."""
    peak_tflops: float | None = None
    """10¹² FLOP/s of one GPU."""

    def mfu(self, tokens_per_second: float, gpus: int) -> float | None:
        """Model FLOPs utilization, from 0 to 1, of ``gpus`` GPUs that together process
        ``tokens_per_second``. None if the file does not give what it needs."""
        if self.gflop_per_token is None or self.peak_tflops is None or gpus < 1:
            return None
        return tokens_per_second * self.gflop_per_token / (gpus * self.peak_tflops * 1e3)


@dataclass(frozen=True, slots=True)
class Job:
    framework: Framework
    strategy: str | None = None
    """The strategy that runs, never ``auto``; ``None`` if the file does not name one."""
    strategy_reason: str = ""
    """Why dtrain chose this strategy, with ``strategy: auto``."""
    script: str | None = None
    module: str | None = None
    command: tuple[str, ...] = ()
    """Exactly one of ``script``, ``module`` and ``command`` is set."""
    per: Literal["gpu", "host"] = "gpu"
    """Whether each GPU (or slot) or each host gets a process. For TensorFlow, ``roles`` decides."""
    binding: Literal["node", "none"] = "node"
    """``node``: each process runs on the cores of its GPU's NUMA node."""
    args: tuple[str, ...] = ()
    workdir: str | None = None
    """Working folder of the workers. ``None``: the folder that ``sync`` fills, else the home folder
    over SSH or the cluster file's folder on this machine."""
    setup: tuple[str, ...] = ()
    container: Container | None = None
    sync: Sync | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    roles: Mapping[str, int] = field(default_factory=dict)
    """TensorFlow task counts by role; empty means one worker on each host."""
    rendezvous: Rendezvous = Rendezvous()
    layout: Layout | None = None
    """Complete: what the file leaves out is filled in from the strategy and the hosts."""
    training: Training | None = None
    expected: Expected | None = None
    restart: Restart = Restart()
    elastic: Elastic | None = None
    success_policy: SuccessPolicy = "all_hosts"
    """``first_host``: the job is done when the processes of the first host are."""
    progress: PrintedSteps | None = None
    watchdog: Watchdog = Watchdog()
    grace: float = 10.0
    """Seconds between TERM and KILL when a job stops."""
    on_disconnect: Literal["stop", "keep"] = "keep"
    lease: float = 300.0
    """Seconds without a launcher after which ``on_disconnect: stop`` stops the job."""

    def serves(self, node_rank: int) -> bool:
        """Whether the processes of a host run until those of the first host are done."""
        return self.success_policy == "first_host" and node_rank > 0

    @property
    def ranked(self) -> bool:
        """Whether its processes are ranks; TensorFlow's are tasks."""
        return self.framework != "tensorflow"


@dataclass(frozen=True, slots=True)
class Notify:
    """Notifications from the launching machine. It has a command, a webhook, or both."""

    on: tuple[NotifyEvent, ...] = get_args(NotifyEvent)
    command: tuple[str, ...] = ()
    webhook: str | None = None
    """Name of the environment variable that has the URL."""


@dataclass(frozen=True, slots=True)
class ClusterFile:
    name: str
    cluster: Cluster
    job: Job
    warnings: tuple[Problem, ...] = ()
    """Problems that do not prevent a launch."""
    notify: Notify | None = None
