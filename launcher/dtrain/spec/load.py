"""Read the text of a cluster file into a `ClusterFile`, or report all of its problems."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any, Literal

from dtrain.runtime.layout import Layout, Training
from dtrain.spec.advice import advise
from dtrain.spec.checks import check
from dtrain.spec.choice import Resolved
from dtrain.spec.clusterfile import CLUSTER_FILE
from dtrain.spec.elastic import check_elastic
from dtrain.spec.engines import check_engine, with_nodes
from dtrain.spec.machines import machines
from dtrain.spec.model import (
    Cluster,
    ClusterFile,
    Container,
    Elastic,
    Expected,
    Job,
    Kubernetes,
    Mount,
    PrintedSteps,
    Rendezvous,
    Restart,
    Slurm,
    Sync,
    Watchdog,
)
from dtrain.spec.notify_keys import read_notify
from dtrain.spec.placeholders import advise_on_placeholders
from dtrain.spec.ports import check_ports
from dtrain.spec.problems import Problems
from dtrain.spec.resolve import resolve
from dtrain.spec.schema import Section
from dtrain.spec.settings import compose
from dtrain.spec.source import MAX_SIZE, Node
from dtrain.spec.strategies import STRATEGIES
from dtrain.spec.unreadable import unreadable
from dtrain.spec.variables import advise_on_variables

FIRST_FILE = "`dtrain init` writes a first one; `dtrain help cluster-file` describes it"


def read_to_plan(
    path: Path, settings: Sequence[str], keys: Iterable[str]
) -> tuple[ClusterFile, str, dict[str, Any]]:
    """Load a cluster file without the keys of its ``job`` that a plan replaces. Returns also its
    strategy, '' if it has none, and those of ``keys`` that its layout has. For ``settings`` see
    `dtrain.spec.settings.compose`.

    Raises SpecError if it is invalid, and UsageError if it cannot be read.
    """
    _, document, problems = read_document(contents(path), str(path), settings)
    job = document.section("job")
    layout = job.section("layout")
    given = {key: value for key in keys if (value := layout.get(key)) is not None}
    spec = _checked(_without_layout(document), problems, str(path))
    return spec, job.get("strategy", ""), given


def position(source: str | bytes, file: str, settings: Sequence[str], key: str) -> str:
    """The place of a key such as ``cluster.slurm.time`` in a valid cluster file, or of the section
    that would hold it: ``cluster.yaml:3:12``."""
    _, section, problems = read_document(source, file, settings)
    *above, last = key.split(".")
    for name in above:
        section = section.section(name)
    return str(problems.position(section.key_place(last)))


def contents(path: Path, kind: str = "*.y*ml", missing: str = FIRST_FILE) -> bytes:
    """The bytes of a cluster file or another small one, up to one more than the size limit.

    Raises UsageError if it cannot be read; `unreadable` describes ``kind`` and ``missing``.
    """
    try:
        with path.open("rb") as file:
            return file.read(MAX_SIZE + 1)
    except (OSError, ValueError) as error:
        raise unreadable(path, error, kind=kind, missing=missing) from None


def read_document(
    source: str | bytes, file: str, settings: Sequence[str] = ()
) -> tuple[Node, Section, Problems]:
    """The nodes and the values of a cluster file, and its problems so far. Raises SpecError if it
    has no keys."""
    root, problems = compose(source, file, settings)
    document = CLUSTER_FILE.read(root, problems, "")
    if document is None:
        raise problems.error()
    return root, document, problems


def parse(source: str | bytes, file: str, settings: Sequence[str] = ()) -> ClusterFile:
    """Read a cluster file's text; ``file`` is its name in messages. Raises SpecError."""
    _, document, problems = read_document(source, file, settings)
    return _checked(document, problems, file)


def _checked(document: Section, problems: Problems, file: str) -> ClusterFile:
    document = with_nodes(document)
    check(document, problems)
    check_engine(document, problems)
    resolved = resolve(document, problems)
    problems.raise_if_any()
    cluster, job = document.section("cluster"), document.section("job")
    values = _cluster(cluster)
    warnings = problems.fresh()
    advise(resolved, cluster, job, values, warnings)
    advise_on_placeholders(cluster, job, warnings)
    advise_on_variables(cluster, job, warnings)
    spec = ClusterFile(
        document.get("name") or _default_name(file),
        values,
        _job(job, resolved, slurm="slurm" in cluster),
        warnings.found,
        read_notify(document),
    )
    check_elastic(spec, job.section("elastic"), problems)
    check_ports(spec, job.section("rendezvous"), problems)
    problems.raise_if_any()
    return spec


@lru_cache(maxsize=16)
def parse_once(text: str, file: str, settings: tuple[str, ...] = ()) -> ClusterFile:
    """`parse`, cached, for the text of `contents` decoded with ``surrogateescape``."""
    return parse(text.encode(errors="surrogateescape"), file, settings)


def _without_layout(document: Section) -> Section:
    """The file without the keys of ``job`` that a plan replaces."""
    if "job" not in document.values:
        return document
    job = document.section("job")
    replaced = ("strategy", "layout", "roles")
    left = replace(
        job,
        values={key: value for key, value in job.values.items() if key not in replaced},
        entries={key: entry for key, entry in job.entries.items() if key not in replaced},
    )
    return replace(document, values={**document.values, "job": left})


def _default_name(file: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(file).stem).strip("-._")
    return name[:64] or "job"


def _cluster(cluster: Section) -> Cluster:
    return Cluster(
        hosts=machines(cluster, cluster.get("hosts", ())),
        slurm=cluster.build("slurm", Slurm),
        kubernetes=cluster.build("kubernetes", Kubernetes),
        spares=machines(cluster, cluster.get("spares", ())),
        gbps=cluster.section("network").get("gbps"),
        **cluster.given("tpu", "run_dir", "trust_group"),
    )


def _training(job: Section, layout: Layout | None) -> Training | None:
    """``job.training``, with the global batch of the layout if the file gives grad_accumulation.

    The script must then use this batch and not its own default.
    """
    training = job.build("training", Training)
    if layout is None or "grad_accumulation" not in job.section("layout"):
        return training
    return replace(training or Training(), global_batch=layout.global_batch)


def _per(job: Section, resolved: Resolved) -> Literal["gpu", "host"]:
    framework = job.get("framework")
    strategy = STRATEGIES[framework].get(resolved.strategy or "")
    by_strategy = strategy is not None and strategy.processes == "host"
    by_host = framework == "tensorflow" or by_strategy or job.get("per") == "host"
    return "host" if by_host else "gpu"


def _container(container: Section, *, slurm: bool) -> Container:
    mounts = tuple(map(Mount.parse, container.get("mounts", ())))
    found = Container(mounts=mounts, **container.given("image", "engine", "options"))
    return replace(found, engine="pyxis") if slurm and "engine" not in container else found


_UNCHANGED = (
    "framework", "script", "module", "command", "binding", "args", "workdir", "setup", "env",
    "secrets", "success_policy", "grace", "on_disconnect", "lease",
)  # fmt: skip
"""Keys of ``job`` whose values are those of `Job`."""


def _job(job: Section, resolved: Resolved, *, slurm: bool) -> Job:
    return Job(
        per=_per(job, resolved),
        strategy=resolved.strategy,
        strategy_reason=resolved.strategy_reason,
        layout=resolved.layout,
        container=_container(job.section("container"), slurm=slurm) if "container" in job else None,
        sync=job.build("sync", Sync),
        roles=resolved.roles,
        rendezvous=Rendezvous(**job.section("rendezvous").values),
        training=_training(job, resolved.layout),
        expected=job.build("expected", Expected),
        restart=Restart(**job.section("restart").values),
        elastic=job.build("elastic", Elastic),
        progress=job.build("progress", PrintedSteps),
        watchdog=Watchdog(**job.section("watchdog").values),
        **job.given(*_UNCHANGED),
    )
