"""From a cluster file's text to a `ClusterFile`, or to everything that is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from dtrain.diagnostics import UsageError
from dtrain.runtime.layout import Layout, Training
from dtrain.spec.checks import check
from dtrain.spec.clusterfile import CLUSTER_FILE, HOMES
from dtrain.spec.hosts import Named
from dtrain.spec.model import (
    LAUNCH_ROLES,
    Cluster,
    ClusterFile,
    Host,
    Job,
    Rendezvous,
    Restart,
    Ssh,
    Sync,
)
from dtrain.spec.schema import Section
from dtrain.spec.source import MAX_SIZE, compose


def read(path: Path) -> ClusterFile:
    """Load a cluster file.

    Raises SpecError if it is wrong, and UsageError if it cannot be read.
    """
    return parse(contents(path), str(path))


def contents(path: Path) -> bytes:
    """What is in a cluster file; of one that is too large, enough to say so.

    Raises UsageError if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(MAX_SIZE + 1)
    except FileNotFoundError:
        raise UsageError(
            f"there is no file {str(path)!r}", hint="dtrain's own configs/ has files to start from"
        ) from None
    except IsADirectoryError:
        raise UsageError(f"{str(path)!r} is a folder", hint="name the cluster file in it") from None
    except PermissionError:
        raise UsageError(
            f"{str(path)!r} cannot be read: permission denied", hint=f"try: ls -l {str(path)!r}"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{str(path)!r} cannot be read: {reason}") from None


def parse(source: str | bytes, file: str) -> ClusterFile:
    """Read a cluster file's text; ``file`` is its name in messages. Raises SpecError."""
    root, problems = compose(source, file)
    problems.homes = HOMES
    document = CLUSTER_FILE.read(root, problems, "")
    if document is None:
        raise problems.error()
    check(document, problems)
    problems.raise_if_any()
    return ClusterFile(
        document.get("name") or _default_name(file),
        _cluster(document.section("cluster")),
        _job(document.section("job")),
    )


def _default_name(file: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(file).stem).strip("-._")
    return name[:64] or "job"


def _cluster(cluster: Section) -> Cluster:
    overrides: dict[str, list[Section]] = {}
    for named, settings in cluster.get("overrides", ()):
        overrides.setdefault(named.name, []).append(settings)
    network = cluster.section("network")
    return Cluster(
        hosts=_hosts(cluster, cluster.get("hosts", ()), overrides),
        spares=_hosts(cluster, cluster.get("spares", ()), overrides),
        gbps=network.get("gbps"),
        **cluster.given("gpu", "run_dir"),
    )


def _hosts(
    cluster: Section,
    names: Iterable[Named],
    overrides: Mapping[str, list[Section]],
) -> tuple[Host, ...]:
    return tuple(_host(cluster, named.name, overrides.get(named.name, [])) for named in names)


def _host(cluster: Section, name: str, overrides: list[Section]) -> Host:
    """A host with the cluster's settings, then its overrides, later ones over earlier ones."""
    ssh = Ssh(**cluster.section("ssh").values)
    settings: dict[str, Any] = cluster.given("gpus", "slots", "python", "transport")
    settings |= cluster.section("network").given("interface")
    env: dict[str, str] = {}
    for own in overrides:
        settings |= own.given("address", "gpus", "slots", "interface", "python", "transport")
        env |= own.get("env", {})
        ssh = replace(ssh, **own.section("ssh").values, **own.given("user", "port"))
    gpus = settings.pop("gpus", 0)
    return Host(
        name=name,
        address=settings.pop("address", name),
        explicit_address=any("address" in own for own in overrides),
        gpus=tuple(range(gpus)) if isinstance(gpus, int) else gpus,
        env=env,
        ssh=ssh,
        **settings,
    )


def _job(job: Section) -> Job:
    sync, rendezvous = job.section("sync"), job.section("rendezvous")
    roles = job.section("roles")
    return Job(
        setup=job.get("setup", ()),
        sync=Sync(**{"source": ".", **sync.values}) if "sync" in job else None,
        roles={role: roles.get(role) for role in LAUNCH_ROLES if roles.get(role)},
        rendezvous=Rendezvous(**rendezvous.values, fixed="port" in rendezvous),
        layout=Layout(**job.section("layout").values) if "layout" in job else None,
        training=Training(**job.section("training").values) if "training" in job else None,
        restart=Restart(**job.section("restart").values),
        **job.given(
            "framework",
            "strategy",
            "script",
            "module",
            "args",
            "workdir",
            "env",
            "secrets",
            "grace",
            "on_disconnect",
            "lease",
        ),
    )
