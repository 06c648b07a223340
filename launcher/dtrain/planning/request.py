"""A request to the planner, and what an engine answers about its machines. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.diagnostics import UsageError
from dtrain.records import dataclass
from dtrain.runtime.layout import SIZES, Layout

if TYPE_CHECKING:
    from dtrain.spec.model import ClusterFile

LARGEST = 10**15
"""The largest integer in a request."""
MODEL_SIZES = (
    "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "experts", "experts_per_token",
)  # fmt: skip
FIXABLE = (
    *SIZES, "virtual_pipeline", "expert", "sharding", "micro_batch", "recompute",
    "sequence_parallel", "offload",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request to the planner. None means: from the cluster file, or a default.

    Give the model in one way: ``model_size``, ``model``, ``model_config`` or ``sizes``.
    """

    file: Path | None = None
    """A cluster file: its hosts, GPUs and network."""
    settings: Sequence[str] = ()
    """Change ``file``, as those of `dtrain.load`."""
    model_size: str | None = None
    """Parameter count such as ``100B``."""
    model: str | None = None
    """Name of a well-known model."""
    model_config: Path | None = None
    """A Hugging Face ``config.json``."""
    sizes: Mapping[str, int | None] = field(default_factory=dict)
    """Values of `MODEL_SIZES`; at least ``layers`` and ``hidden``."""
    mtp: int | None = None
    """Further tokens that the model predicts at each position."""
    vocab: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    lora_rank: int | None = None
    """Rank of adapters, if only they are trained."""
    lora_targets: str | None = None
    """``all`` or ``attention``; needs ``lora_rank``."""
    base_bits: int | None = None
    """16, 8 (with fp8) or 4; needs ``lora_rank``."""
    tokens: str | None = None
    precision: str | None = None
    state_bits: int | None = None
    """16 or 32: bits of Adam's moments, and whether there is a copy of the parameters in 32."""
    overlap_experts: bool | None = None
    """Whether the software exchanges tokens between experts while it computes others."""
    cuda_graph: bool | None = None
    """Whether one CUDA graph has the whole step, so that no GPU waits for its host."""
    gpus: int | None = None
    gpu: str | None = None
    gpus_per_host: int | None = None
    network_gbps: float | None = None
    rack_hosts: int | None = None
    """Hosts of one rack; needs ``rack_gbps``."""
    rack_gbps: float | None = None
    """Gb/s of one host to hosts of other racks, while all hosts of its rack send there."""
    hardware: Path | None = None
    calibrate: Path | None = None
    probe: bool = False
    """Whether to measure the devices and links of ``file`` first, and plan with that."""
    trials: int = 0
    """The best layouts to train for a few steps on the machines of ``file``."""
    calibrate_runs: Sequence[str] = ()
    """Runs of this machine, by name, from which its speed is learned."""
    failure_rate: float | None = None
    """Failures per 1,000 node-days, of nodes with 8 GPUs; this and the next two need ``tokens``."""
    restart_minutes: float | None = None
    storage_gbs: float | None = None
    """GB/s with which all hosts together write a checkpoint."""
    price_per_gpu_hour: float | None = None
    """In any currency; needs ``tokens``."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Required values of `FIXABLE` fields of a layout."""
    framework: str | None = None
    backend: str | None = None


@dataclass(frozen=True, slots=True)
class QueueGpus:
    """The GPUs of the machines that an engine may choose for a job."""

    where: str
    """Where these machines are, such as ``partition gpu``."""
    chosen_by: str
    """The key below ``cluster`` that chooses among the types."""
    types: tuple[str, ...]
    """The names of GPUs in the cluster's configuration; empty if it names none."""
    per_host: int
    left_out: str = ""
    """Which machines do not count, and why; empty if all count."""


AskQueue = Callable[["ClusterFile"], QueueGpus]
"""Asks an engine about the GPUs of a file's job. Raises DtrainError."""


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,), "int": (int,), "float": (int, float), "bool": (bool,), "Path": (Path,),
    "Mapping": (Mapping,), "Sequence": (list, tuple),
}  # fmt: skip
"""What a value's annotation allows. `constraints` checks the fields with a choice of words."""


def check_request(request: PlanRequest) -> None:
    """Raise UsageError for an unknown key in ``sizes`` or ``fixed``, a value of a wrong type, and
    an integer that is too large for floating-point numbers."""
    for one in fields(request):
        _check_value(one.name, getattr(request, one.name), str(one.type))
    declared = {one.name: str(one.type) for one in fields(Layout)}
    for field_name, given, known in (
        ("sizes", request.sizes, dict.fromkeys(MODEL_SIZES, "int | None")),
        ("fixed", request.fixed, {name: declared[name] for name in FIXABLE}),
    ):
        for name, value in given.items():
            if name not in known:
                raise UsageError(
                    f"`{field_name}` has no key {name!r}", hint=f"one of {', '.join(known)}"
                )
            _check_value(name, value, known[name])


def _check_value(name: str, value: object, annotation: str) -> None:
    kind, _, optional = annotation.partition(" | ")
    types = _TYPES.get(kind.partition("[")[0], (object,))
    # A bool is an int.
    allowed = isinstance(value, types) and (kind == "bool" or not isinstance(value, bool))
    if not (allowed or (optional and value is None)):
        raise UsageError(f"`{name}={value!r}` is not of type {kind}")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise UsageError(
            f"`{name}`: a number of {len(str(abs(value)))} digits is too long",
            hint=f"at most {LARGEST:,}",
        )
