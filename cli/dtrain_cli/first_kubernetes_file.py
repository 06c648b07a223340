"""The text of a first cluster file for Kubernetes, from answers and the machines. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from dtrain.engines.kubernetes.machines import KubernetesMachine, Vendor
from dtrain.engines.kubernetes.manifest import GPUS
from dtrain.records import dataclass
from dtrain.spec.yaml_text import literal
from dtrain.wording import counted
from dtrain_cli.first_file import in_table, program


@dataclass(frozen=True, slots=True)
class KubernetesAnswers:
    """What only the user knows."""

    image: str
    nodes: int
    gpus: int | None
    """Of each pod; None: all of a machine."""
    framework: str
    script: str


def text(answers: KubernetesAnswers, machines: Sequence[KubernetesMachine], vendor: Vendor) -> str:
    """``machines``: those that pods may use, with GPUs of the ``vendor``, as far as known."""
    kinds = Counter(machines).most_common()
    enough = [each for each in kinds if each[0].gpus >= (answers.gpus or 0)]
    alike, count = enough[0] if enough else (None, 0)
    keys = {"image": answers.image, **({"gpu_vendor": vendor} if vendor != "nvidia" else {})}
    return "\n".join(
        [
            "# Written by `dtrain init`. Show the objects that a launch would create:",
            "#   dtrain launch FILE --dry-run",
            "# Check the file, the cluster and the image:",
            "#   dtrain check FILE",
            "#",
            *(f"# {line}" for line in _summaries(kinds)),
            "cluster:",
            "  kubernetes:",
            *(f"    {key}: {literal(value)}" for key, value in keys.items()),
            *_selector(alike, machines),
            *([f"    tolerations: [{GPUS[vendor]}]"] if alike and alike.tainted else ()),
            f"  nodes: {answers.nodes}"
            + (f"  # the cluster has {counted(count, 'such machine')}" if count else ""),
            *_devices(answers, alike),
            "",
            "job:",
            f"  framework: {answers.framework}",
            f"  {program(answers.script)}",
            "  workdir: ~  # CHANGE: the folder of the script in the image, or on a volume",
            "",
        ]
    )


def _summaries(kinds: Sequence[tuple[KubernetesMachine, int]]) -> Iterator[str]:
    """One line for each kind of machine with GPUs."""
    yield "Machines with GPUs:" if kinds else "No machines with whole GPUs were found."
    for machine, count in kinds:
        named = machine.label[1] if machine.label else "its labels do not say which"
        yield f"  {counted(count, 'machine')} with {counted(machine.gpus, 'GPU')}: {named}"


def _selector(
    alike: KubernetesMachine | None, machines: Sequence[KubernetesMachine]
) -> Iterator[str]:
    """GPUs of different types do not fit in one job."""
    if alike is not None and alike.label is not None and len({one.label for one in machines}) > 1:
        key, value = map(literal, alike.label)
        yield f"    node_selector: {{{key}: {value}}}"


def _devices(answers: KubernetesAnswers, alike: KubernetesMachine | None) -> Iterator[str]:
    gpus = alike.gpus if answers.gpus is None and alike is not None else answers.gpus
    yield f"  gpus: {gpus}  # of each pod"
    if not gpus:
        yield "  slots: 1  # processes of each pod"
    elif alike is not None and (known := in_table(alike.gpu_type)):
        yield f"  gpu: {known}  # for `dtrain plan`"
