"""The environment variables that a cluster file sets, in `job.env` and for single hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dtrain.environ.reserved import RESERVED, refusal
from dtrain.spec.problems import Problems, TextSpan, shown
from dtrain.spec.schema import Section
from dtrain.spec.source import Entry, Mapping, Scalar

_REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)
"""A use of a variable in a shell."""
_USUAL = {"HOME", "LD_LIBRARY_PATH", "PATH", "PWD", "PYTHONPATH", "SCRATCH", "TMPDIR", "USER"}
"""Variables of hosts. Others may be meant as they are written: $ORIGIN, or a part of a password."""


def check_variables(cluster: Section, job: Section, problems: Problems) -> None:
    """Report variables and secrets that dtrain sets itself, and those that are both."""
    secrets = set(job.get("secrets", ()))
    for entry in _entries(cluster, job):
        name, place = entry.key.text, entry.key.place
        _refuse_reserved(name, place, problems)
        if name in secrets and name not in RESERVED:
            problems.add(
                f"{name} is also listed in job.secrets",
                place,
                "the value of a secret comes from your own environment; keep one of the two",
            )
    secrets_node = job.entries["secrets"].value if "secrets" in job else None
    for item in getattr(secrets_node, "items", ()):
        _refuse_reserved(getattr(item, "text", ""), item.place, problems)


def advise_on_variables(cluster: Section, job: Section, warnings: Problems) -> None:
    """Warn about values such as ``/opt/bin:$PATH``, which only a shell would expand."""
    for entry in _entries(cluster, job):
        name, value = entry.key.text, entry.value
        if not isinstance(value, Scalar):
            continue
        for found in _REFERENCE.finditer(value.text):
            if {*_USUAL, name}.isdisjoint(found.groups()):
                continue
            warnings.add(
                f"no shell reads the values of env: {name} gets {shown(found[0])} as it is written",
                value.part(found.start(), len(found[0])),
                f"to use a variable of the host, set {name} with `export` in job.setup",
            )
            break


def _refuse_reserved(name: str, place: TextSpan, problems: Problems) -> None:
    if name in RESERVED:
        message, hint = refusal(name)
        problems.add(message, place, hint)


def _entries(cluster: Section, job: Section) -> Iterator[Entry]:
    """Every environment variable that the file sets."""
    environments = [job]
    seen: set[int] = set()
    for _, settings in cluster.get("overrides", ()):
        if id(settings) not in seen:
            seen.add(id(settings))
            environments.append(settings)
    for section in environments:
        env = section.entries["env"].value if "env" in section else None
        if isinstance(env, Mapping):
            yield from env.entries
