"""The parts of the manual that are generated from the code, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dtrain.parallelism.answer.units import large
from dtrain.parallelism.cluster.hardware import Gpu
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.parallelism.model.models import models
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


_MODELS_HEAD = """\
# Known models and GPUs

<!-- Generated from models.json and hardware.json by scripts/reference. -->

Names for `--model` and `--gpu` of `dtrain plan`; `cluster.gpu` takes the same GPUs. Capital
letters, spaces and dashes do not matter, and common other names work too (`--gpu A100-SXM4-80GB`),
as do repositories of Hugging Face (`--model meta-llama/Llama-3.1-8B-Instruct`).

## Models

Each with its parameters. Plan another model from its Hugging Face file (`--model-config`), a size
(`--model-size 7B`), or its shape (`--layers`, `--hidden`, …).

"""

_GPUS_HEAD = """
## GPUs

Speeds are TFLOP/s of dense products: in bf16, or in fp16 (*) without it. The last two columns
are what a plan assumes without `--gpus-per-host` and `--network-gbps`; with half of the GPUs, a
host has half of the network, but at least 200 Gb/s of it. Each of an MI250X's two dies is a
GPU. Describe another GPU in a file for `--hardware`.

| GPU | GiB | bf16 | fp8 | GPUs per host | Gb/s of a host |
| --- | --- | --- | --- | --- | --- |
"""


def known() -> str:
    """Models, those of a family in one line, and GPUs with their memory, speed and usual hosts."""
    families: dict[str, list[str]] = {}
    for one in models():
        # The letters before the first number or dash, such as "llama" and "gpt".
        family = re.match("[a-z]+", one.name)
        assert family, one.name
        families.setdefault(family[0], []).append(f"{one.name} ({large(one.parameters)})")
    # Names with one model are no families.
    lines = [", ".join(names) for names in families.values() if len(names) > 1]
    lines.append(", ".join(names[0] for names in families.values() if len(names) == 1))
    rows = "".join(f"| {' | '.join(_gpu(gpu))} |\n" for gpu in hardware().gpus)
    return _MODELS_HEAD + "".join(f"- {line}\n" for line in lines) + _GPUS_HEAD + rows


def _gpu(gpu: Gpu) -> tuple[str, ...]:
    host = hardware().machine(gpu.machine)
    mark = "" if gpu.usual == "bf16" else " *"
    return (
        gpu.name,
        f"{gpu.memory:.0f}",
        f"{gpu.flops[gpu.usual]:,.0f}{mark}",
        f"{gpu.flops['fp8']:,.0f}" if "fp8" in gpu.flops else "",
        str(host.gpus_per_host),
        f"{host.network_gbps:g}",
    )
