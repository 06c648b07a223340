"""Convert a request to the planner into a `Question`: a model given in one of four ways, a
cluster from options or a cluster file, and defaults for the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dtrain import hostlist, plan_request
from dtrain.diagnostics import DtrainError, UsageError
from dtrain.parallelism.backends import BACKENDS
from dtrain.parallelism.cluster.hardware import (
    FORMAT,
    PRECISIONS,
    Gpu,
    GpuCluster,
    Hardware,
    Precision,
    hardware,
    slowest,
)
from dtrain.parallelism.constraints import check_sizes
from dtrain.parallelism.model.adapters import Lora
from dtrain.parallelism.model.shape import Shape
from dtrain.parallelism.model.sizes import parse_count, shape_for_size, shape_from_sizes
from dtrain.parallelism.question import KEPT, Question, fine_tuning_batch, remarks, usual_batch
from dtrain.parallelism.reliability import Reliability
from dtrain.plan_request import LARGEST, AskQueue, PlanRequest, check, of_a_training, tokens_of
from dtrain.records import dataclass
from dtrain.runtime.layout import BackendName

if TYPE_CHECKING:
    from dtrain.parallelism.cluster.efficiency import Efficiency
    from dtrain.parallelism.cluster.probe import Probe
    from dtrain.spec.model import ClusterFile

_T = TypeVar("_T")

USUAL_GPU, USUAL_HOSTS = "a100-80gb", 8
MAX_FILE = 16 << 20
"""Characters of a model, hardware or calibration file."""


def pose(request: PlanRequest, ask: AskQueue | None = None, probe: Probe | None = None) -> Question:
    """Return the planner's question for a request. ``ask`` is for a file that leaves the choice of
    its machines to an engine and does not name their GPU. ``probe``: measurements of the machines.

    Raises UsageError, or SpecError if the cluster file is invalid.
    """
    check(request)
    spec = _spec(request.file)
    table = _table(request.hardware)
    where = _Where(request, spec, table, ask, probe)
    cluster = _in_racks(request, where.cluster())
    shape = _shape(request, spec)
    precision, note = _precision(request, spec, cluster.gpu)
    shape = replace(shape, lora=_lora(request, shape, precision))
    batch, batch_source = _batch(request, spec, shape, cluster)
    check_sizes(shape, batch)
    strategy, of_file = _strategy_and_layout(request.file)
    backend_of_file = of_file.pop("backend", None)
    backend = _backend(request.backend or backend_of_file)
    framework = _framework(request, spec, shape)
    return Question(
        shape,
        cluster,
        _efficiency(request, cluster, probe),
        batch,
        precision=precision,
        narrow_states=plan_request.narrow_states(request, spec, framework, precision),
        framework=framework,
        backend=backend or "runtime",
        backend_from=plan_request.backend_from(request, backend, strategy),
        fixed=request.fixed,
        kept=of_file if backend in (None, "runtime") else {},
        tokens=tokens_of(request, batch * shape.seq_len),
        reliability=_reliability(request),
        price_per_gpu_hour=of_a_training(request, "price_per_gpu_hour"),
        cluster_source=where.source,
        batch_source=batch_source,
        notes=(*where.overruled, *filter(None, (note, *remarks(cluster, batch, shape.seq_len)))),
        hardware=table,
        probe=probe,
    )


def _reliability(request: PlanRequest) -> Reliability:
    given = {
        "failures": ("failure_rate", 1.0),
        "restart": ("restart_minutes", 60.0),
        "storage": ("storage_gbs", 1.0),
    }
    values = {name: (of_a_training(request, key), unit) for name, (key, unit) in given.items()}
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
    names = ("backend", "lora_rank", "state_bits")
    for_torch = [*request.fixed, *(name for name in names if getattr(request, name) is not None)]
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
    if name is None:
        return None
    for known in BACKENDS:
        if name == known:
            return known
    raise UsageError(f"`backend={name!r}` is not known", hint=f"one of {', '.join(BACKENDS)}")


def _strategy_and_layout(file: Path | None) -> tuple[str, dict[str, Any]]:
    """Return the file's strategy, and the keys of its layout that the planner never chooses."""
    if file is None:
        return "", {}
    from dtrain.spec.load import strategy_and_layout

    return strategy_and_layout(file, ("backend", *KEPT))


# The model.


def _shape(request: PlanRequest, spec: ClusterFile | None) -> Shape:
    """Return the model's shape, given in exactly one of four ways."""
    sizes = {name: value for name, value in request.sizes.items() if value is not None}
    ways = {
        "`model_size`": request.model_size,
        "`model`": request.model,
        "`model_config`": request.model_config,
        " ".join(f"`{name}`" for name in sizes): sizes or None,
    }
    given = [way for way, value in ways.items() if value is not None]
    if not given:
        raise UsageError(
            "no model to plan for",
            hint=(
                "set `model_size='100B'`, `model='llama-3-70b'`, `model_config='config.json'`, or "
                "`layers` and `hidden`"
            ),
        )
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} each describe a model", hint="keep one of them")
    training = spec.job.training if spec else None
    seq_len = request.seq_len or (training.seq_len if training else None)
    if request.seq_len is not None and request.seq_len < 1:
        raise UsageError(f"`seq_len={request.seq_len}` is not a length", hint="such as 4096")
    if request.model_size is not None:
        return shape_for_size(parse_count(request.model_size), seq_len=seq_len, vocab=request.vocab)
    if sizes:
        missing = [f"`{name}`" for name in ("layers", "hidden") if name not in sizes]
        if missing:
            raise UsageError(
                f"{given[0]} requires {' and '.join(missing)}",
                hint="sizes of a model include at least `layers` and `hidden`",
            )
        return shape_from_sizes(
            layers=sizes["layers"],
            hidden=sizes["hidden"],
            heads=sizes.get("heads"),
            kv_heads=sizes.get("kv_heads"),
            ffn_hidden=sizes.get("ffn_hidden"),
            vocab=request.vocab,
            seq_len=seq_len,
            experts=sizes.get("experts", 0),
            experts_per_token=sizes.get("experts_per_token"),
        )
    if request.vocab is not None and request.vocab < 1:
        raise UsageError(f"`vocab={request.vocab}` is not a vocabulary", hint="such as 128256")
    if request.model_config is not None:
        from dtrain.parallelism.model.huggingface import shape_from_config

        hint = "download config.json from the model's page on Hugging Face"
        shape = _parsed(request.model_config, shape_from_config, hint)
    else:
        from dtrain.parallelism.model.models import model

        shape = model(request.model or "")
    return shape.with_lengths(seq_len or shape.seq_len, request.vocab or shape.vocab)


def _lora(request: PlanRequest, shape: Shape, precision: Precision) -> Lora | None:
    """Return the adapters to train; None to train the whole model."""
    rank, targets = request.lora_rank, request.lora_targets or "all"
    if rank is None:
        for name in ("lora_targets", "base_bits"):
            value = getattr(request, name)
            if value is not None:
                raise UsageError(
                    f"`{name}={value!r}` is for the training of adapters",
                    hint="add `lora_rank`, such as 16",
                )
        return None
    if shape.every_part or shape.pattern:
        raise UsageError(
            f"`lora_rank={rank}`: dtrain plans adapters only for stacks of attention and MLPs",
            hint="leave it out, or choose another model",
        )
    if not 1 <= rank <= shape.hidden:
        raise UsageError(
            f"`lora_rank={rank}` is not a rank", hint=f"at least 1, at most {shape.hidden}"
        )
    if targets not in ("all", "attention"):
        raise UsageError(f"`lora_targets={targets!r}` is not known", hint="one of all, attention")
    return Lora(
        rank, "all" if targets == "all" else "attention", plan_request.base_bits(request, precision)
    )


# Where.


@dataclass(slots=True)
class _Where:
    """The cluster, from options, else the cluster file, else 8 hosts of 8 A100s."""

    request: PlanRequest
    spec: ClusterFile | None
    table: Hardware
    ask: AskQueue | None = None
    probe: Probe | None = None
    overruled: list[str] = field(default_factory=list)
    source: str = ""

    def cluster(self) -> GpuCluster:
        request = self.request
        chosen = (request.gpus, request.gpu, request.gpus_per_host, request.network_gbps)
        if self.spec is None:
            if all(value is None for value in chosen):
                self.source = "assumed: give a cluster file, or `gpus` and `gpu`, for yours"
            gpu = self.table.gpu(request.gpu or USUAL_GPU)
            per_host = request.gpus_per_host
            usual = per_host or self.table.machine(gpu.machine).gpus_per_host
            gpus = USUAL_HOSTS * usual if request.gpus is None else request.gpus
            if self.source == "" and (request.gpus is None or request.gpu is None):
                assumed = [f"`gpus={gpus}`"] * (request.gpus is None)
                assumed += [f"`gpu={gpu.name!r}`"] * (request.gpu is None)
                self.source = f"assumed: {', '.join(assumed)}"
            return self.table.cluster(
                gpu, gpus, gpus_per_host=per_host, network_gbps=request.network_gbps
            )
        return self._of_file(self.spec)

    def _of_file(self, spec: ClusterFile) -> GpuCluster:
        request, name = self.request, str(self.request.file)
        self.source = f"from {name}"
        hosts = spec.cluster.hosts
        if self.probe is not None and self.probe.is_cpu:
            return self._of_cpus(self.probe, len(hosts))
        per_host = request.gpus_per_host
        gpus = request.gpus
        of_file = sorted({host.gpu for host in hosts if host.gpu is not None})
        kinds = [request.gpu] if request.gpu else of_file
        if not kinds and self.probe is not None:
            kinds = [self.probe.device]
        elif not kinds and spec.cluster.slurm is not None and self.ask is not None:
            of_queue, count = self._of_queue(spec, name)
            kinds = [of_queue]
            if per_host is None and not hosts[0].gpus:
                per_host = count
        if per_host is None:
            counts = sorted({len(host.gpus) for host in hosts})
            if len(counts) > 1:
                raise UsageError(
                    f"{name}: hosts have {', '.join(map(str, counts[:-1]))} and {counts[-1]} GPUs, "
                    "and a layout needs equal hosts",
                    hint=f"list only equal hosts, or plan for `gpus_per_host={counts[0] or 1}`",
                )
            per_host = counts[0]
            if not per_host and gpus is None:
                raise UsageError(
                    f"{name}: its hosts have no GPUs, and layouts are planned for GPUs",
                    hint="set cluster.gpus, or use `gpus` and `gpus_per_host`",
                )
        if gpus is None:
            gpus = len(hosts) * per_host
        unnamed = [host.name for host in hosts if host.gpu is None] if kinds == of_file else []
        if unnamed and request.gpu is None:
            which = hostlist.fold(unnamed) if of_file else "its hosts"
            raise UsageError(
                f"{name} does not name the GPU of {which}",
                hint=f"add 'gpu: {USUAL_GPU}' to cluster, or use `gpu={USUAL_GPU!r}`",
            )
        # A GPU may have several names.
        named = {gpu.name: gpu for gpu in map(self.table.gpu, kinds)}
        if len(named) > 1:
            self.overruled.append(
                f"{name} has {' and '.join(named)}: planned with the speed of the slowest and the "
                "least memory, because each step waits for all GPUs"
            )
        gbps = spec.cluster.gbps if request.network_gbps is None else request.network_gbps
        for given, value, other in (
            ("gpu", request.gpu, " and ".join(of_file) or None),
            ("gpus", request.gpus, sum(len(host.gpus) for host in hosts)),
            ("network_gbps", request.network_gbps, spec.cluster.gbps),
        ):
            if value is not None and other is not None and value != other:
                self.overruled.append(f"`{given}={value!r}` overrides {other} of {name}")
        gpu = slowest(named.values())
        cluster = self.table.cluster(gpu, gpus, gpus_per_host=per_host or None, network_gbps=gbps)
        if gbps is None and cluster.hosts > 1:
            self.overruled.append(
                f"{name} has no network.gbps: {cluster.network * 8:g} Gb/s is typical of "
                f"{cluster.gpu.name}"
            )
        return cluster

    def _of_cpus(self, probe: Probe, hosts: int) -> GpuCluster:
        """The measured CPUs as devices, one for each rank."""
        for name in ("gpu", "gpus", "gpus_per_host", "hardware"):
            if getattr(self.request, name) is not None:
                raise UsageError(
                    f"`{name}` is for GPUs, but the hosts have none: `probe` measured their CPUs",
                    hint="leave it out, or plan without `probe`",
                )
        gbps = self.request.network_gbps or (probe.network or probe.copy) * 8
        return self.table.cluster(
            probe.as_gpu(), hosts * probe.per_host, gpus_per_host=probe.per_host, network_gbps=gbps
        )

    def _of_queue(self, spec: ClusterFile, name: str) -> tuple[str, int]:
        """The GPU's name in the table, and the number of GPUs of a machine, from the engine."""
        assert self.ask is not None  # noqa: S101 (types)
        hint = f"add 'gpu: {USUAL_GPU}' to cluster, or use `gpu={USUAL_GPU!r}`"
        try:
            found = self.ask(spec)
        except DtrainError as error:
            raise UsageError(
                f"{name} does not name the GPU of its machines, and its partition cannot be asked:"
                f" {error.message}",
                hint="\n".join(filter(None, (hint, error.hint))),
            ) from None
        where = f"partition {found.partition}"
        if not found.per_host:
            raise UsageError(
                f"the machines of {where} have no GPUs, and layouts are planned for GPUs",
                hint="set another partition in the file, or use `gpus` and `gpu`",
            )
        if not found.types:
            raise UsageError(f"{where} does not say which GPUs its machines have", hint=hint)
        if len(found.types) > 1:
            raise UsageError(
                f"{where} has GPUs of {len(found.types)} types: {', '.join(found.types)}",
                hint=f"set gpu_type in the file to one of them, or use `gpu={USUAL_GPU!r}`",
            )
        (kind,) = found.types
        try:
            gpu = self.table.gpu(kind).name
        except UsageError as error:
            raise UsageError(
                f"{where} has GPUs of type {kind!r}, which dtrain does not know",
                hint="\n".join(filter(None, (hint, error.hint))),
            ) from None
        self.overruled.append(
            f"{where} has GPUs of type {kind}, planned as {gpu}; cluster.gpu overrides this"
        )
        return gpu, found.per_host


def _in_racks(request: PlanRequest, cluster: GpuCluster) -> GpuCluster:
    """Return the cluster with the racks of the request."""
    hosts, gbps = request.rack_hosts, request.rack_gbps
    if hosts is None and gbps is None:
        return cluster
    if hosts is None or gbps is None:
        raise UsageError(
            "`rack_hosts` and `rack_gbps` describe the racks together",
            hint="give both: the hosts of one rack, and the Gb/s of one host to other racks",
        )
    if not 1 <= hosts <= LARGEST:
        raise UsageError(f"`rack_hosts={hosts}` is not a number of hosts", hint="at least 1")
    if not 0 < gbps < 1e9:
        raise UsageError(
            f"`rack_gbps={gbps:g}` is not a bandwidth",
            hint="Gb/s of one host to hosts of other racks, such as 400",
        )
    if hosts >= cluster.hosts:
        return cluster
    between = min(gbps / 8, cluster.network)
    return replace(cluster, rack_hosts=hosts, between_racks=between)


def _spec(path: Path | None) -> ClusterFile | None:
    if path is None:
        return None
    from dtrain.spec.load import read

    # Read it without its layout, which the plan replaces.
    return read(path, without=("strategy", "layout", "roles"))


def _table(path: Path | None) -> Hardware:
    if path is None:
        return hardware()
    return _parsed(path, hardware().extended, FORMAT)


def _efficiency(request: PlanRequest, cluster: GpuCluster, probe: Probe | None) -> Efficiency:
    from dtrain.parallelism.cluster.efficiency import of_gpu

    efficiency = of_gpu(cluster.gpu)
    if request.calibrate is None and probe is None:
        return efficiency
    from dtrain.parallelism.cluster.calibration import calibrated, read

    if probe is not None:
        table = probe.calibration(cluster.gpu, efficiency)
        return calibrated(table, "the probe", efficiency, cluster.gpu, cluster.network)
    assert request.calibrate is not None  # noqa: S101 (types)

    return _parsed(
        request.calibrate,
        lambda text, where: read(text, where, efficiency, cluster.gpu, cluster.network),
        "`dtrain check FILE --bandwidth` writes such a file",
    )


def _parsed(path: Path, parse: Callable[[str, str], _T], missing: str) -> _T:
    """Read a user's file, and return the result of ``parse``. Raises UsageError. For ``missing``
    see `_text`."""
    return parse(_text(path, missing), str(path))


def _text(path: Path, missing: str) -> str:
    """Read a user's UTF-8 file. Raises UsageError. ``missing``: the hint if there is none."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MAX_FILE + 1)
    except UnicodeDecodeError:
        raise UsageError(f"{str(path)!r} is not a text file") from None
    except (OSError, ValueError) as error:
        # Imported here, because a plan without a file reads none.
        from dtrain.spec.unreadable import unreadable

        raise unreadable(path, error, kind="*.json", missing=missing) from None
    if len(text) > MAX_FILE:
        raise UsageError(f"{str(path)!r} is too large: more than {MAX_FILE >> 20} MiB")
    return text


# How.


def _precision(request: PlanRequest, spec: ClusterFile | None, gpu: Gpu) -> tuple[Precision, str]:
    """Return the precision of the computation, and a note if dtrain chose it."""
    training = spec.job.training if spec else None
    wanted = request.precision or (training.precision if training else None)
    if wanted is None:
        if "bf16" in gpu.flops:
            return "bf16", ""
        first: Precision = next(one for one in PRECISIONS if one in gpu.flops)
        return first, f"{gpu.name} does not support bf16: planned for {first}"
    for precision in PRECISIONS:
        if precision == wanted:
            gpu.peak(precision)
            return precision, ""
    raise UsageError(
        f"`precision={wanted!r}` is not one of {', '.join(PRECISIONS)}",
        hint="bf16 is typical; fp8 needs an H100 or newer, nvfp4 a Blackwell GPU",
    )


def _batch(
    request: PlanRequest, spec: ClusterFile | None, shape: Shape, cluster: GpuCluster
) -> tuple[int, str]:
    """Return the sequences in a step, and their source."""
    if request.global_batch is not None:
        if request.global_batch < 1:
            given = f"`global_batch={request.global_batch}`"
            raise UsageError(f"{given} is not a batch", hint="at least 1 sequence")
        return request.global_batch, ""
    training = spec.job.training if spec else None
    if training and training.global_batch:
        return training.global_batch, f"from {request.file}"
    batch = usual_batch(shape, cluster.gpus)
    if shape.lora is not None:
        batch = fine_tuning_batch(batch, cluster.gpus)
    return batch, "assumed: set `global_batch` to change it"
