"""Placeholders such as ``{rank}`` in a command, its arguments and environment values.

A placeholder is one of `NAMES` in braces, not after ``$``. Every other brace is literal, so that
JSON and ``${VAR}`` pass unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches

from dtrain.environ.template import Template
from dtrain.spec.machines import override_sections
from dtrain.spec.problems import Problems, shown
from dtrain.spec.schema import Section
from dtrain.spec.source import Scalar

PER_PROCESS = ("rank", "local_rank")
"""Placeholders that differ between the processes of one host."""
NAMES = (
    *PER_PROCESS, "node_rank", "world_size", "nodes", "gpus", "total_gpus", "addresses",
    "master_addr", "master_port", "host", "run", "attempt",
)  # fmt: skip
_PLACEHOLDER = re.compile(rf"(?<!\$)\{{({'|'.join(NAMES)})\}}")
_LOOKALIKE = re.compile(r"(?<!\$)\{\s*([A-Za-z][A-Za-z _-]{0,20}?)\s*\}")
_PLAIN = {name.replace("_", ""): name for name in NAMES}


def names_in(text: str) -> set[str]:
    return set(_PLACEHOLDER.findall(text))


def fill(text: str, values: Mapping[str, str]) -> str:
    """``text`` with its placeholders replaced. Raises KeyError for one without a value."""
    parts = _PLACEHOLDER.split(text)
    if len(parts) == 1:
        return text
    parts[1::2] = [values[name] for name in parts[1::2]]
    return Template(*filter(None, parts))


def fill_all(texts: Iterable[str], values: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(fill(text, values) for text in texts)


def check_placeholders(cluster: Section, job: Section, problems: Problems) -> None:
    """Report placeholders without a value: torchrun assigns the ranks that it starts."""
    backend = job.section("rendezvous").get("backend", "direct")
    if not _by_torchrun(job.get("framework"), backend):
        return
    for scalar in _texts(cluster, job):
        for found in _PLACEHOLDER.finditer(scalar.text):
            if found[1] in PER_PROCESS:
                message, hint = without_value(found[1], backend)
                problems.add(message, scalar.part(found.start(), len(found[0])), hint)


def missing_value(text: str, framework: str, backend: str) -> str:
    """The first placeholder in ``text`` that has no value; empty if all have one."""
    found = names_in(text) & {*PER_PROCESS} if _by_torchrun(framework, backend) else ()
    return min(found, default="")


def without_value(name: str, backend: str) -> tuple[str, str]:
    """The error and the hint for a placeholder without a value."""
    return (
        f"{{{name}}} has no value with 'backend: {backend}': torchrun starts and numbers the ranks",
        f"read {name.upper()} in the script, or use 'backend: direct'",
    )


def _by_torchrun(framework: str | None, backend: str) -> bool:
    return framework == "torch" and backend != "direct"


def advise_on_placeholders(cluster: Section, job: Section, warnings: Problems) -> None:
    """Warn about text in braces that looks like a placeholder but is not one."""
    for scalar in _texts(cluster, job):
        for found in _LOOKALIKE.finditer(scalar.text):
            if _PLACEHOLDER.fullmatch(found[0]):
                continue
            plain = re.sub("[ _-]", "", found[1]).lower()
            close = get_close_matches(plain, _PLAIN, n=1, cutoff=0.85)
            if close:
                warnings.add(
                    f"{shown(found[0])} is not a placeholder, so dtrain passes it unchanged",
                    scalar.part(found.start(), len(found[0])),
                    f"did you mean {{{_PLAIN[close[0]]}}}?",
                )


def _texts(cluster: Section, job: Section) -> Iterator[Scalar]:
    """Every text of the file that may contain placeholders."""
    for section in (job, *override_sections(cluster)):
        for key in ("command", "args", "env"):
            yield from section.texts(key)
