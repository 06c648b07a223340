"""Engines start a job: SSH, Slurm or Kubernetes. The table of what works on which, and its checks.

A cluster file names its engine by a key of `cluster`. A feature that the engine lacks is refused
at its key.
"""

from __future__ import annotations

from dataclasses import replace

from dtrain.records import dataclass
from dtrain.spec.hosts import Named
from dtrain.spec.kubernetes_keys import check_kubernetes
from dtrain.spec.problems import Problems
from dtrain.spec.schema import Section


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature, the keys that ask for it, and the engines that have it."""

    name: str
    keys: tuple[str, ...] = ()
    engines: tuple[str, ...] = ("ssh", "slurm", "kubernetes")
    instead: str = ""
    """The alternative on Slurm, if the feature does not work there."""
    on_kubernetes: str = ""
    """The alternative on Kubernetes, if it is another one than on Slurm."""


_ONLY_SSH, _NOT_KUBERNETES = ("ssh",), ("ssh", "slurm")
NAMES = {"slurm": "Slurm", "kubernetes": "Kubernetes"}
"""The engines that choose the machines, by their key below `cluster`."""

FEATURES = (
    Feature("dry run, scripts to run by hand"),
    Feature("live output, first cause of a failure, logs"),
    Feature("detach, attach, stop"),
    Feature("notifications", ("notify",)),
    Feature("PyTorch, TensorFlow, JAX and other programs", ("job.framework",)),
    Feature("torchrun (static, c10d)", ("job.rendezvous.backend",)),
    Feature("setup lines", ("job.setup",)),
    Feature("secrets", ("job.secrets",)),
    Feature(
        "sync, on Slurm to a folder that all machines share, on Kubernetes of less than 1 MiB",
        ("job.sync",),
    ),
    Feature("restarts", ("job.restart.max",)),
    Feature("end with the processes of the first host", ("job.success_policy",)),
    Feature(
        "containers of apptainer and enroot",
        ("job.container",),
        _NOT_KUBERNETES,
        on_kubernetes="remove it: cluster.kubernetes.image is the container of the job",
    ),
    Feature("containers of pyxis", engines=("slurm",)),
    Feature("network interface", ("cluster.network.interface",)),
    Feature("training progress and slow ranks of `dtrain.runtime`"),
    Feature("training progress that the program prints", ("job.progress",)),
    Feature("telemetry"),
    Feature("hang diagnosis", ("job.watchdog",)),
    Feature("`dtrain exec` on the machines of a run"),
    Feature("number of machines, from a queue", ("cluster.nodes",), ("slurm", "kubernetes")),
    Feature("`dtrain check`"),
    Feature("`dtrain init`, GPU types for `dtrain plan`"),
    Feature(
        "hosts by name",
        ("cluster.hosts",),
        _ONLY_SSH,
        instead="Slurm chooses the machines: write how many, such as 'nodes: 8'",
        on_kubernetes="Kubernetes chooses the machines: write how many pods, such as 'nodes: 8'",
    ),
    Feature(
        "settings of single hosts",
        ("cluster.overrides",),
        _ONLY_SSH,
        instead="remove it: all machines of a Slurm job have the same settings",
        on_kubernetes="remove it: all pods have the same settings",
    ),
    Feature(
        "SSH settings, local processes",
        ("cluster.ssh", "cluster.transport"),
        _ONLY_SSH,
        instead="remove it; 'slurm: {login: HOST}' names the host where dtrain submits the job",
        on_kubernetes="remove it: dtrain uses the API, see cluster.kubernetes.context",
    ),
    Feature("TPU slices", ("cluster.tpu",), _ONLY_SSH, instead="remove it, and use GPUs or CPUs"),
    Feature(
        "folders of a trusted group",
        ("cluster.trust_group",),
        _NOT_KUBERNETES,
        on_kubernetes="remove it: the pods use volumes, see cluster.kubernetes.claims",
    ),
    Feature(
        "spares",
        ("cluster.spares",),
        _ONLY_SSH,
        instead="remove it: 'restart: {max: 3}' in job queues the job again, on other machines",
        on_kubernetes="remove it: 'restart: {max: 3}' in job starts all pods again",
    ),
    Feature(
        "elastic jobs",
        ("job.elastic",),
        _ONLY_SSH,
        instead="remove it: 'restart: {max: 3}' in job queues the job again",
        on_kubernetes="remove it: 'restart: {max: 3}' in job starts all pods again",
    ),
    Feature(
        "binding to NUMA nodes",
        ("job.binding",),
        _ONLY_SSH,
        instead="remove it; 'slurm: {cpus: 12}' gives each process CPUs of its own",
        on_kubernetes="remove it: the CPU manager of the kubelet binds pods to CPUs",
    ),
    Feature(
        "containers of docker and podman",
        engines=_ONLY_SSH,
        instead="remove 'engine', to use pyxis or apptainer",
    ),
    Feature("checks of the machines before a launch", engines=_ONLY_SSH),
    Feature("TensorBoard of `dtrain.runtime`", engines=("ssh", "kubernetes")),
    Feature(
        "folder of runs on the machines",
        ("cluster.run_dir",),
        _NOT_KUBERNETES,
        on_kubernetes="remove it: each pod has a folder of its own for the run",
    ),
    Feature(
        "lease of the launcher",
        ("job.on_disconnect", "job.lease"),
        _ONLY_SSH,
        instead="remove it: a Slurm job does not need its launcher",
        on_kubernetes="remove it: the pods do not need the launcher",
    ),
    Feature(
        "time limit of an unreachable host",
        ("job.restart.node_timeout",),
        _ONLY_SSH,
        instead="remove it: the Slurm administrator sets this time (SlurmdTimeout)",
        on_kubernetes="remove it: Kubernetes itself replaces pods of a machine that is gone",
    ),
)
"""In the order of the table in `dtrain help slurm`."""


def with_nodes(document: Section) -> Section:
    """The file with names in place of the hosts that its engine has yet to choose."""
    cluster = document.section("cluster")
    nodes = cluster.get("nodes")
    if _engine(cluster) == "" or "hosts" in cluster or nodes is None:
        return document
    place = cluster.place("nodes")
    hosts = tuple(Named(f"node{rank}", place) for rank in range(nodes))
    cluster = replace(cluster, values={**cluster.values, "hosts": hosts})
    return replace(document, values={**document.values, "cluster": cluster})


def check_engine(document: Section, problems: Problems) -> None:
    """Report features that the file's engine lacks, at their keys."""
    cluster = document.section("cluster")
    engine = _engine(cluster)
    container = document.section("job").section("container")
    if engine != "slurm" and container.get("engine") == "pyxis":
        problems.add(
            "containers of pyxis are available on Slurm only",
            container.place("engine"),
            "use docker, podman, apptainer or enroot",
        )
    if not engine:
        if "nodes" in cluster:
            problems.add(
                "cluster.nodes counts the machines of a Slurm job, or pods on Kubernetes",
                cluster.key_place("nodes"),
                "remove it: cluster.hosts lists the machines; or add 'slurm: {}' instead of hosts",
            )
        return
    if "slurm" in cluster and "kubernetes" in cluster:
        problems.add(
            "cluster.slurm and cluster.kubernetes exclude each other",
            cluster.key_place("kubernetes"),
            "keep the one where the job runs",
        )
        return
    _refuse(document, engine, problems)
    if "nodes" not in cluster:
        problems.add(
            "cluster.nodes is missing",
            cluster.key_place(engine),
            "set the number of machines that the job needs, e.g. 'nodes: 8'",
        )
    if isinstance(cluster.get("gpus"), tuple):
        problems.add(
            f"{NAMES[engine]} chooses which GPUs a job gets, so cluster.gpus must be a count",
            cluster.place("gpus"),
            f"write 'gpus: {len(cluster.get('gpus'))}'",
        )
    job = document.section("job")
    if job.get("strategy") == "tpu":
        problems.add(
            f"the strategy tpu is not available on {NAMES[engine]}",
            job.place("strategy"),
            "use GPUs or CPUs, with another strategy",
        )
    if engine == "slurm":
        _check_slurm(cluster, container, problems)
    else:
        check_kubernetes(cluster.section("kubernetes"), job, problems)


def _check_slurm(cluster: Section, container: Section, problems: Problems) -> None:
    slurm = cluster.section("slurm")
    if "gpu_type" in slurm and cluster.get("gpus") == 0:
        problems.add(
            "cluster.slurm.gpu_type has no effect, because the job asks for no GPUs",
            slurm.key_place("gpu_type"),
            "remove it, or set cluster.gpus",
        )
    engine = container.get("engine")
    if engine in ("docker", "podman"):
        problems.add(
            f"containers of {engine} are not available on Slurm, which cannot stop them",
            container.place("engine"),
            "remove it, to use pyxis or apptainer",
        )


def _engine(cluster: Section) -> str:
    """``slurm`` or ``kubernetes``; empty for SSH."""
    return next((name for name in NAMES if name in cluster), "")


def _refuse(document: Section, engine: str, problems: Problems) -> None:
    for feature in FEATURES:
        for path in () if engine in feature.engines else feature.keys:
            *above, key = path.split(".")
            section = document
            for name in above:
                section = section.section(name)
            if key in section:
                problems.add(
                    f"{path} is not available on {NAMES[engine]}",
                    section.key_place(key),
                    (engine == "kubernetes" and feature.on_kubernetes) or feature.instead,
                )
