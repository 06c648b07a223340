"""Engines start a job: SSH, or Slurm. The table of what works on which, and its checks.

A cluster file names its engine by a key of `cluster`. A feature that the engine lacks is refused
at its key.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dtrain.spec.hosts import Named
from dtrain.spec.problems import Problems
from dtrain.spec.schema import Section


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature, the keys that ask for it, and the engines that have it."""

    name: str
    keys: tuple[str, ...] = ()
    ssh: bool = True
    slurm: bool = True
    instead: str = ""
    """The alternative on Slurm, if the feature does not work there."""


FEATURES = (
    Feature("dry run, scripts to run by hand"),
    Feature("live output, first cause of a failure, logs"),
    Feature("detach, attach, stop"),
    Feature("notifications", ("notify",)),
    Feature("PyTorch, TensorFlow, JAX and other programs", ("job.framework",)),
    Feature("torchrun (static, c10d)", ("job.rendezvous.backend",)),
    Feature("setup lines", ("job.setup",)),
    Feature("secrets", ("job.secrets",)),
    Feature("sync, on Slurm to a folder that all machines share", ("job.sync",)),
    Feature("restarts", ("job.restart.max",)),
    Feature("containers of apptainer and enroot", ("job.container",)),
    Feature("containers of pyxis", ssh=False),
    Feature("network interface", ("cluster.network.interface",)),
    Feature("training progress and slow ranks of `dtrain.runtime`"),
    Feature("telemetry"),
    Feature("hang diagnosis", ("job.watchdog",)),
    Feature("`dtrain exec` on the machines of a run"),
    Feature("number of machines, from a queue", ("cluster.nodes", "cluster.slurm"), ssh=False),
    Feature("`dtrain check`, `dtrain init`, GPU types for `dtrain plan`"),
    Feature(
        "hosts by name",
        ("cluster.hosts",),
        slurm=False,
        instead="Slurm chooses the machines: write how many, such as 'nodes: 8'",
    ),
    Feature(
        "settings of single hosts",
        ("cluster.overrides",),
        slurm=False,
        instead="remove it: all machines of a Slurm job have the same settings",
    ),
    Feature(
        "SSH settings, local processes",
        ("cluster.ssh", "cluster.transport"),
        slurm=False,
        instead="remove it; 'slurm: {login: HOST}' names the host where dtrain submits the job",
    ),
    Feature(
        "TPU slices",
        ("cluster.tpu",),
        slurm=False,
        instead="remove it, and use GPUs or CPUs",
    ),
    Feature(
        "folders of a trusted group",
        ("cluster.trust_group",),
        slurm=False,
        instead="remove it: the job's script does not check who owns its folders",
    ),
    Feature(
        "spares",
        ("cluster.spares",),
        slurm=False,
        instead="remove it: 'restart: {max: 3}' in job queues the job again, on other machines",
    ),
    Feature(
        "elastic jobs",
        ("job.elastic",),
        slurm=False,
        instead="remove it: 'restart: {max: 3}' in job queues the job again",
    ),
    Feature(
        "binding to NUMA nodes",
        ("job.binding",),
        slurm=False,
        instead="remove it; 'slurm: {cpus: 12}' gives each process CPUs of its own",
    ),
    Feature(
        "containers of docker and podman",
        slurm=False,
        instead="remove 'engine', to use pyxis or apptainer",
    ),
    Feature("checks before a launch", slurm=False),
    Feature("TensorBoard of `dtrain.runtime`", slurm=False),
    Feature(
        "lease of the launcher",
        ("job.on_disconnect", "job.lease"),
        slurm=False,
        instead="remove it: a Slurm job does not need its launcher",
    ),
    Feature(
        "time limit of an unreachable host",
        ("job.restart.node_timeout",),
        slurm=False,
        instead="remove it: the Slurm administrator sets this time (SlurmdTimeout)",
    ),
)
"""In the order of the table in `dtrain help slurm`."""


def table() -> str:
    """The features as a Markdown table."""
    rows = [("feature", "keys", "SSH", "Slurm"), ("---",) * 4]
    for one in FEATURES:
        keys = ", ".join(f"`{key}`" for key in one.keys)
        rows.append((one.name, keys, "yes" if one.ssh else "no", "yes" if one.slurm else "no"))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def with_nodes(document: Section) -> Section:
    """The file with names in place of the hosts that Slurm has yet to allocate."""
    cluster = document.section("cluster")
    nodes = cluster.get("nodes")
    if "slurm" not in cluster or "hosts" in cluster or nodes is None:
        return document
    place = cluster.place("nodes")
    hosts = tuple(Named(f"node{rank}", place) for rank in range(nodes))
    cluster = replace(cluster, values={**cluster.values, "hosts": hosts})
    return replace(document, values={**document.values, "cluster": cluster})


def check_engine(document: Section, problems: Problems) -> None:
    """Report features that the file's engine lacks, at their keys."""
    cluster = document.section("cluster")
    if "slurm" not in cluster:
        if "nodes" in cluster:
            problems.add(
                "cluster.nodes counts the machines of a Slurm job",
                cluster.key_place("nodes"),
                "remove it: cluster.hosts lists the machines; or add 'slurm: {}' instead of hosts",
            )
        container = document.section("job").section("container")
        if container.get("engine") == "pyxis":
            problems.add(
                "containers of pyxis are available on Slurm only",
                container.place("engine"),
                "use docker, podman, apptainer or enroot",
            )
        return
    _refuse(document, FEATURES, problems)
    if "nodes" not in cluster:
        problems.add(
            "cluster.nodes is missing",
            cluster.key_place("slurm"),
            "set the number of machines that the job needs, e.g. 'nodes: 8'",
        )
    if isinstance(cluster.get("gpus"), tuple):
        problems.add(
            "Slurm chooses which GPUs a job gets, so cluster.gpus must be a count",
            cluster.place("gpus"),
            f"write 'gpus: {len(cluster.get('gpus'))}'",
        )
    slurm = cluster.section("slurm")
    if "gpu_type" in slurm and cluster.get("gpus") == 0:
        problems.add(
            "cluster.slurm.gpu_type has no effect, because the job asks for no GPUs",
            slurm.key_place("gpu_type"),
            "remove it, or set cluster.gpus",
        )
    job = document.section("job")
    container = job.section("container")
    engine = container.get("engine")
    if engine in ("docker", "podman"):
        problems.add(
            f"containers of {engine} are not available on Slurm, which cannot stop them",
            container.place("engine"),
            "remove it, to use pyxis or apptainer",
        )
    if job.get("strategy") == "tpu":
        problems.add(
            "the strategy tpu is not available on Slurm",
            job.place("strategy"),
            "use GPUs or CPUs, with another strategy",
        )


def _refuse(document: Section, features: Iterable[Feature], problems: Problems) -> None:
    for feature in features:
        for path in () if feature.slurm else feature.keys:
            *above, key = path.split(".")
            section = document
            for name in above:
                section = section.section(name)
            if key in section:
                problems.add(
                    f"{path} is not available on Slurm", section.key_place(key), feature.instead
                )
