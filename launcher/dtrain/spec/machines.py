"""Build hosts from the cluster's settings and the overrides of each host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from dtrain.spec.hosts import Named
from dtrain.spec.model import Host, Ssh
from dtrain.spec.schema import Section


def machines(cluster: Section, names: Iterable[Named]) -> tuple[Host, ...]:
    """The hosts with these names, in their order."""
    own = overrides(cluster)
    return tuple(_machine(cluster, named.name, own.get(named.name, [])) for named in names)


def overrides(cluster: Section) -> dict[str, list[Section]]:
    """The sections with settings of each host that has some, in file order."""
    found: dict[str, list[Section]] = {}
    for named, settings in cluster.get("overrides", ()):
        found.setdefault(named.name, []).append(settings)
    return found


def override_sections(cluster: Section) -> list[Section]:
    """The sections with settings of single hosts, each once: the hosts of a list share one."""
    return list({id(own): own for _, own in cluster.get("overrides", ())}.values())


def devices_sound(cluster: Section) -> bool:
    """Whether everything about hosts and their devices was read without a problem."""
    return (
        "hosts" in cluster.values
        and cluster.sound("gpus", "slots", "overrides")
        and all(own.sound("gpus", "slots") for own in override_sections(cluster))
    )


def _machine(cluster: Section, name: str, own: Iterable[Section]) -> Host:
    """A host with the cluster's settings and its ``own``; the last that gives a key wins."""
    ssh = Ssh(**cluster.section("ssh").values)
    settings: dict[str, Any] = cluster.given("gpus", "gpu", "slots", "python", "transport")
    settings |= cluster.section("network").given("interface")
    env: dict[str, str] = {}
    for section in own:
        settings |= section.given(
            "address", "gpus", "gpu", "slots", "interface", "python", "transport"
        )
        env |= section.get("env", {})
        ssh = replace(ssh, **{**section.section("ssh").values, **section.given("user", "port")})
    gpus = settings.pop("gpus", 0)
    return Host(
        name=name,
        address=settings.pop("address", name),
        gpus=tuple(range(gpus)) if isinstance(gpus, int) else gpus,
        env=env,
        ssh=ssh,
        **settings,
    )
