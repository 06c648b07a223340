"""Converts a request to the planner into a `Question`, with defaults for what it leaves out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from dtrain.diagnostics import UsageError
from dtrain.parallelism.answer.units import times
from dtrain.parallelism.backends import BACKENDS, without_backend
from dtrain.parallelism.cluster import calibration
from dtrain.parallelism.cluster.efficiency import Efficiency, of_gpu
from dtrain.parallelism.cluster.hardware import PRECISIONS, Gpu, GpuCluster, Precision
from dtrain.parallelism.cluster.probe import Probe
from dtrain.parallelism.constraints import check_sizes
from dtrain.parallelism.model.further import with_further_tokens
from dtrain.parallelism.model.shape import Shape
from dtrain.parallelism.model.sizes import parse_count
from dtrain.parallelism.question import KEPT, Question
from dtrain.parallelism.reliability import Reliability
from dtrain.planning.batch import batch_of, too_few_tokens
from dtrain.planning.cluster import cluster_of, table_of
from dtrain.planning.files import parsed
from dtrain.planning.model import lora_of, shape_of
from dtrain.planning.request import LARGEST, AskQueue, PlanRequest
from dtrain.runtime.layout import BackendName, Training

if TYPE_CHECKING:
    from dtrain.spec.model import ClusterFile


def pose(request: PlanRequest, ask: AskQueue | None = None, probe: Probe | None = None) -> Question:
    """Return the planner's question for a request. ``ask`` is for a file that leaves the choice of
    its machines to an engine and does not name their GPU. ``probe``: measurements of the machines.

    Raises UsageError, or SpecError if the cluster file is invalid.
    """
    spec, strategy, of_file = _of_file(request)
    table = table_of(request)
    found = cluster_of(request, spec, table, ask, probe)
    cluster = found.cluster
    training = (spec.job.training if spec else None) or Training()
    shape, assumed = shape_of(request, training)
    precision, note = _precision(request, training, cluster.gpu)
    shape = replace(shape, lora=lora_of(request, shape, precision))
    shape = with_further_tokens(shape, request.mtp or 0)
    batch, batch_source = batch_of(request, training, shape, cluster)
    check_sizes(shape, batch)
    few = too_few_tokens(cluster, batch, shape.seq_len)
    notes = (assumed, note, without_backend(cluster.gpu), few)
    backend_of_file = of_file.pop("backend", None)
    backend = _backend(request.backend or backend_of_file)
    framework = _framework(request, spec, shape)
    return Question(
        shape,
        cluster,
        _efficiency(request, cluster, probe),
        batch,
        precision=precision,
        narrow_states=_narrow_states(request, training, framework, precision),
        hides_exchange=_hides_exchange(request, training, shape, framework),
        one_graph=_one_graph(request, training, framework, cluster.gpu),
        framework=framework,
        backend=backend or "runtime",
        backend_from=_backend_from(request, backend, strategy),
        fixed=request.fixed,
        kept=of_file if backend in (None, "runtime") else {},
        tokens=_tokens_of(request, batch * shape.seq_len),
        reliability=_reliability(request),
        price_per_gpu_hour=_of_a_training(request, "price_per_gpu_hour"),
        cluster_source=found.source,
        batch_source=batch_source,
        notes=(*found.notes, *filter(None, notes)),
        hardware=table,
        probe=probe,
    )


def _reliability(request: PlanRequest) -> Reliability:
    given = {
        "failures": ("failure_rate", 1.0),
        "restart": ("restart_minutes", 60.0),
        "storage": ("storage_gbs", 1.0),
    }
    values = {name: (_of_a_training(request, key), unit) for name, (key, unit) in given.items()}
    return Reliability(
        **{name: value * unit for name, (value, unit) in values.items() if value is not None}
    )


def _framework(
    request: PlanRequest, spec: ClusterFile | None, shape: Shape
) -> Literal["torch", "tensorflow"]:
    framework = request.framework or (spec.job.framework if spec else "torch")
    if framework == "torch":
        return "torch"
    if framework != "tensorflow":
        text = f"`framework={framework!r}`: dtrain cannot plan for it"
        raise UsageError(text, hint="use torch or tensorflow")
    names = (
        "backend", "lora_rank", "state_bits", "tokens", "price_per_gpu_hour", "failure_rate",
        "restart_minutes", "storage_gbs",
    )  # fmt: skip
    for_torch = [*request.fixed, *(name for name in names if getattr(request, name) is not None)]
    for_torch += [
        name for name in ("overlap_experts", "cuda_graph", "mtp") if getattr(request, name)
    ]
    if for_torch:
        raise UsageError(
            f"`{for_torch[0]}` applies only to torch layouts",
            hint="leave it out, or use `framework='torch'`",
        )
    if shape.every_part or shape.pattern:
        raise UsageError(
            "`framework='tensorflow'`: dtrain plans it only for stacks of attention and MLPs",
            hint="use `framework='torch'`, or choose another model",
        )
    return "tensorflow"


def _backend(name: str | None) -> BackendName | None:
    if name is None or name in BACKENDS:
        return name
    raise UsageError(f"`backend={name!r}` is not known", hint=f"one of {', '.join(BACKENDS)}")


def _backend_from(
    request: PlanRequest, backend: BackendName | None, strategy: str
) -> Literal["", "backend", "trials", "strategy"]:
    """Return what chose the backend, as in `Question`; ``strategy`` is the cluster file's."""
    if backend is not None:
        return "backend"
    if request.trials:
        # They train with dtrain.runtime.
        return "trials"
    # All other strategies of torch are applied by dtrain.runtime.
    return "" if strategy in ("", "auto", "none") else "strategy"


def _of_file(request: PlanRequest) -> tuple[ClusterFile | None, str, dict[str, Any]]:
    """Return the cluster file without its layout, its strategy, and the keys of its layout that the
    planner never chooses."""
    if request.file is None:
        if request.settings:
            raise UsageError("`settings` needs a cluster file, but there is none", hint="add FILE")
        return None, "", {}
    from dtrain.spec.load import read_to_plan

    return read_to_plan(request.file, request.settings, ("backend", *KEPT))


def _efficiency(request: PlanRequest, cluster: GpuCluster, probe: Probe | None) -> Efficiency:
    efficiency, network = of_gpu(cluster.gpu), cluster.network
    if probe is not None:
        table = probe.calibration(cluster.gpu, efficiency)
        return calibration.calibrated(table, "the probe", efficiency, cluster.gpu, network)
    if request.calibrate is None:
        return efficiency
    return parsed(
        request.calibrate,
        lambda text, where: calibration.read(text, where, efficiency, cluster.gpu, network),
        "`dtrain check FILE --bandwidth` writes such a file",
    )


def _precision(request: PlanRequest, training: Training, gpu: Gpu) -> tuple[Precision, str]:
    """Return the precision of the computation, and a note if dtrain chose it, or if another one
    with as much memory is much faster."""
    wanted = request.precision or training.precision
    if wanted is None:
        if "bf16" in gpu.flops:
            return "bf16", ""
        first: Precision = next(one for one in PRECISIONS if one in gpu.flops)
        why = (
            "bf16 is not faster on these CPUs"
            if gpu.is_cpu
            else f"{gpu.name} does not support bf16"
        )
        return first, f"{why}: planned for {first}"
    for precision in PRECISIONS:
        if precision == wanted:
            gain = gpu.flops.get("tf32", 0.0) / gpu.peak(precision)
            if precision != "fp32" or gain < 1.5:
                return precision, ""
            return precision, (
                "products in tf32 (`precision='tf32'`) need as much memory as in fp32, and their "
                f"peak is {times(gain)} as high"
            )
    raise UsageError(
        f"`precision={wanted!r}` is not one of {', '.join(PRECISIONS)}",
        hint="bf16 is typical; fp8 needs an H100 or newer, nvfp4 a Blackwell GPU",
    )


def _narrow_states(
    request: PlanRequest, training: Training, framework: str, precision: str
) -> bool:
    """Return whether all states have 16 bits: in the request, or else in the cluster file.

    TensorFlow's never have.

    Raises:
        UsageError: the number is not known, or does not go with another value.
    """
    bits, source = request.state_bits, f"`state_bits={request.state_bits}`"
    if bits not in (None, 16, 32):
        raise UsageError(f"{source} is not known", hint="use 16 or 32")
    if bits is None:
        bits = training.state_bits
        source = f"{request.file}: job.training.state_bits {bits}"
    if bits != 16 or framework != "torch":
        return False
    if precision != "bf16":
        raise UsageError(
            f"{source} needs bf16, not {precision}", hint="use `state_bits` 32, or `precision` bf16"
        )
    return True


def _hides_exchange(request: PlanRequest, training: Training, shape: Shape, framework: str) -> bool:
    """Return whether tokens are exchanged beside the computation: as the request says, or else the
    cluster file.

    Raises:
        UsageError: the model or another value does not allow it.
    """
    source, given = "`overlap_experts`", request.overlap_experts
    if given is None:
        source, given = f"{request.file}: job.training.overlap_experts", training.overlap_experts
    if not given or framework != "torch":
        return False
    if not shape.experts:
        without = "leave it out" if request.overlap_experts else "use `overlap_experts=False`"
        raise UsageError(
            f"{source} is for models with experts",
            hint=f"{without}, or choose another model",
        )
    if request.fixed.get("recompute") == "full":
        raise UsageError(
            f"{source} does not go with `recompute='full'`: Megatron-LM does not have both",
            hint="use `recompute='selective'`",
        )
    return True


def _one_graph(request: PlanRequest, training: Training, framework: str, gpu: Gpu) -> bool:
    """Return whether one CUDA graph has a step: as the request says, or else the cluster file.

    Raises:
        UsageError: the device has no CUDA graphs.
    """
    source, hint, given = "`cuda_graph`", "leave it out", request.cuda_graph
    if given is None:
        source, hint = f"{request.file}: job.training.cuda_graph", "use `cuda_graph=False`"
        given = training.cuda_graph
    if not given or framework != "torch":
        return False
    if without_backend(gpu):
        raise UsageError(f"{source}: {gpu.name} has no CUDA graphs", hint=hint)
    return True


def _tokens_of(request: PlanRequest, step: int) -> int | None:
    """Return the tokens of the whole training, of which one step takes ``step``."""
    if request.tokens is None:
        return None
    tokens = parse_count(request.tokens, "tokens")
    if tokens > LARGEST:
        raise UsageError(f"`tokens` {request.tokens!r} is too many", hint=f"at most {LARGEST:,}")
    if tokens < step:
        raise UsageError(
            f"`tokens` {request.tokens!r} is less than one step, which has {step:,} tokens",
            hint="give more tokens, or a smaller `global_batch` or `seq_len`",
        )
    return tokens


def _of_a_training(request: PlanRequest, key: str) -> float | None:
    """Return a value of the request that only a training on a number of tokens needs."""
    value: float | None = getattr(request, key)
    if value is None:
        return None
    if not 1 / LARGEST <= value <= LARGEST:
        hint = "a number above 0" if value <= 0 else f"from {1 / LARGEST:g} to {LARGEST:g}"
        raise UsageError(f"`{key}={value:g}` is not possible", hint=hint)
    if request.tokens is None:
        raise UsageError(f"`{key}` is for the days of a training", hint="add `tokens`, such as 2T")
    return value
