"""The environment variables that a cluster file sets, in `job.env` and for single hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dtrain.spec.machines import override_sections
from dtrain.spec.problems import Problems, TextSpan, shown
from dtrain.spec.schema import Section
from dtrain.spec.source import Entry, Mapping, Scalar

_NUMBERS = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE",
)  # fmt: skip
RESERVED = {
    **dict.fromkeys(_NUMBERS, "it follows from the hosts and their gpus"),
    "TORCHELASTIC_RUN_ID": "it names the run",
    "TORCHELASTIC_ERROR_FILE": "dtrain reads the failures that workers write there",
    "MASTER_ADDR": "it is the first host's address, which cluster.overrides can set",
    "MASTER_PORT": "job.rendezvous.port sets it",
    "TF_CONFIG": "it follows from the hosts and job.roles",
    "DTRAIN_ATTEMPT": "it counts the job's starts",
    "DTRAIN_RUN_ID": "it names the run",
    "DTRAIN_STRATEGY": "it is job.strategy",
    "DTRAIN_LAYOUT": "it is job.layout",
    "DTRAIN_TRAINING": "it is job.training",
    "DTRAIN_HOST": "it is the host's name",
    "DTRAIN_RUN_DIR": "cluster.run_dir sets it",
}
"""Variables by which a program finds its place in the job: a cluster file may not set them. Their
values are composed by `dtrain.environ` and `dtrain.launchplan.environment`."""

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
    for item in job.texts("secrets"):
        _refuse_reserved(item.text, item.place, problems)


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


def refusal(name: str) -> tuple[str, str]:
    """The error and the hint for a reserved variable that the user sets."""
    return f"{name} is set by dtrain for each worker", f"remove it; {RESERVED[name]}"


def _refuse_reserved(name: str, place: TextSpan, problems: Problems) -> None:
    if name in RESERVED:
        message, hint = refusal(name)
        problems.add(message, place, hint)


def _entries(cluster: Section, job: Section) -> Iterator[Entry]:
    """Every environment variable that the file sets."""
    for section in (job, *override_sections(cluster)):
        env = section.entries["env"].value if "env" in section else None
        if isinstance(env, Mapping):
            yield from env.entries
