"""The parts of the manual that are generated from the code, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from dtrain.spec.clusterfile import CLUSTER_FILE
from dtrain.spec.engines import FEATURES, NAMES
from dtrain.spec.hosts import Overrides
from dtrain.spec.scalars import Duration
from dtrain.spec.schema import Field, SectionType

_HEAD = """\
# Reference: every key of the cluster file

<!-- Generated from the schema by scripts/reference: edit the schema, then run that script. -->

`dtrain help KEY` shows one key and the keys below it: `dtrain help job.restart`.
"""


def reference() -> str:
    """One section for each key: meaning, type, default, framework and example."""
    sections = (_section(path, field) for path, field in keys(CLUSTER_FILE))
    return "\n".join([_HEAD, *sections])


def keys(record: SectionType, above: str = "") -> Iterator[tuple[str, Field]]:
    """Every key by its full path. ``HOST`` is the placeholder for host names below overrides."""
    for key, field in record.fields.items():
        path = f"{above}{key}"
        yield path, field
        if isinstance(field.type, SectionType):
            yield from keys(field.type, f"{path}.")
        elif isinstance(field.type, Overrides):
            yield from keys(field.type.settings, f"{path}.HOST.")


def _section(path: str, field: Field) -> str:
    # A section has no type and no default: the keys below it do.
    section = isinstance(field.type, SectionType)
    default = "required" if field.required else field.otherwise or _value(field)
    facts = {
        "Type": "" if section else field.type.expects,
        "Default": default,
        "Framework": field.only and f"{field.only} only",
        "Example": field.example and f"`{path.rpartition('.')[2]}: {field.example}`",
    }
    lines = "".join(f"- {fact}: {text}\n" for fact, text in facts.items() if text)
    return f"## {path}\n\n{field.description}\n" + (f"\n{lines}" if lines else "")


def _value(field: Field) -> str:
    if field.default is None:
        return ""
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    return f"`{field.default}{'s' if isinstance(field.type, Duration) else ''}`"


def features() -> str:
    """The table of features by engine."""
    rows: list[tuple[str, ...]] = [("feature", "keys", "SSH", "Slurm", "Kubernetes"), ("---",) * 5]
    for one in FEATURES:
        keys = ", ".join(f"`{key}`" for key in one.keys)
        has = ("yes" if engine in one.engines else "no" for engine in ("ssh", *NAMES))
        rows.append((one.name, keys, *has))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
