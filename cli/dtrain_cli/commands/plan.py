"""`dtrain plan`: how to split a model over a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dtrain.diagnostics import UsageError
from dtrain.parallelism.cluster.hardware import (
    PRECISIONS,
    Cluster,
    Gpu,
    Hardware,
    Precision,
    hardware,
)
from dtrain.parallelism.constraints import check_sizes, option
from dtrain.parallelism.layout import Layout
from dtrain.parallelism.model.shape import Shape
from dtrain.parallelism.model.sizes import parse_count, shape_for_size, shape_from_sizes
from dtrain.parallelism.question import Answer, Question, usual_batch

if TYPE_CHECKING:
    from dtrain.parallelism.cluster.efficiency import Efficiency
    from dtrain.spec.model import ClusterFile

_T = TypeVar("_T")

USUAL_GPU, USUAL_HOSTS = "a100-80gb", 8
LARGEST = 10**15
"""Of an integer among the options."""
MAX_FILE = 16 << 20
"""Characters of a file; a longer one is not what it should be."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of `dtrain plan`; None where an option is absent."""

    file: Path | None = None
    model_size: str | None = None
    model: str | None = None
    model_config: Path | None = None
    sizes: Mapping[str, int | None] = field(default_factory=dict)
    """``layers``, ``hidden``, ``heads``, ``kv_heads``, ``ffn_hidden``, ``experts`` and
    ``experts_per_token``."""
    vocab: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    tokens: str | None = None
    precision: str | None = None
    gpus: int | None = None
    gpu: str | None = None
    gpus_per_host: int | None = None
    network_gbps: float | None = None
    hardware: Path | None = None
    calibrate: Path | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a layout that may have only one value."""
    framework: str | None = None
    top: int = 8
    json: bool = False
    output: Path | None = None
    html: Path | None = None


def plan(options: Options) -> str:
    """Search, write the files that are asked for, and return the text for stdout.

    Raises UsageError, or SpecError where the cluster file is wrong.
    """
    _check_digits(options)
    if options.top < 1:
        raise UsageError(f"--top {options.top} shows nothing", hint="at least 1")
    spec = _spec(options.file)
    table = _table(options.hardware)
    where, notes = _Where(options, spec, table), []
    cluster = where.cluster()
    notes += where.overruled
    shape = _shape(options, spec)
    precision, note = _precision(options, spec, cluster.gpu)
    notes += [note] if note else []
    batch, batch_source = _batch(options, spec, shape, cluster)
    check_sizes(shape, batch)
    question = Question(
        shape,
        cluster,
        _efficiency(options, cluster),
        batch,
        precision=precision,
        fixed=options.fixed,
        tokens=None if options.tokens is None else parse_count(options.tokens, "--tokens"),
        cluster_source=where.source,
        batch_source=batch_source,
    )
    if _framework(options, spec) == "tensorflow":
        return _tensorflow(question, options, notes)
    answer = question.answer()
    written: list[str] = []
    if options.output is not None:
        written.append(_write_cluster_file(answer, options.output, options.file, spec))
    if options.html is not None:
        from dtrain_cli.files import write_text
        from dtrain_cli.views.layouts_html import page

        write_text(options.html, page(answer, table, count=options.top, notes=notes))
        written.append(f"{options.html}: a page with charts")
    if options.json:
        from dtrain.parallelism.answer.document import document

        return _as_json(document(answer, table, options.top, [*notes, *written]))
    from dtrain_cli.sheet import stdout_paper
    from dtrain_cli.views import layouts

    return layouts.as_text(
        answer, table, stdout_paper(), count=options.top, notes=notes, written=written
    )


def _check_digits(options: Options) -> None:
    """Raise UsageError for an integer that floating-point numbers cannot hold."""
    given = {
        **{name: getattr(options, name) for name in ("vocab", "seq_len", "global_batch", "gpus")},
        "gpus_per_host": options.gpus_per_host,
        **options.sizes,
        **options.fixed,
    }
    for name, value in given.items():
        if isinstance(value, int) and abs(value) > LARGEST:
            raise UsageError(
                f"{option(name)}: a number of {len(str(abs(value)))} digits is too long",
                hint=f"at most {LARGEST:,}",
            )


def _framework(options: Options, spec: ClusterFile | None) -> str:
    framework = options.framework or (spec.job.framework if spec else "torch")
    if framework not in ("torch", "tensorflow"):
        raise UsageError(
            f"--framework {framework} is not one that dtrain plans for",
            hint="torch or tensorflow",
        )
    return framework


def _tensorflow(question: Question, options: Options, notes: list[str]) -> str:
    """The same question where the strategies of `tf.distribute` are the choice."""
    from dtrain.parallelism import tensorflow

    if question.fixed:
        first = option(next(iter(question.fixed)))
        raise UsageError(
            f"{first} is of layouts, which TensorFlow has none of",
            hint="leave it out, or use --framework torch",
        )
    if options.output is not None or options.html is not None:
        what = "--output" if options.output is not None else "--html"
        raise UsageError(
            f"{what} is for layouts of torch",
            hint="set job.strategy in the cluster file to the strategy that is shown",
        )
    found = tensorflow.answer(
        question.shape,
        question.cluster,
        global_batch=question.global_batch,
        precision=question.precision,
    )
    if options.json:
        from dtrain.parallelism.answer.document import SCHEMA, cluster, model

        head = {"schema": SCHEMA, "model": model(question), "cluster": cluster(question)}
        return _as_json({**head, **found.to_document()})
    from dtrain_cli.sheet import stdout_paper
    from dtrain_cli.views import strategies

    return strategies.as_text(question, found, stdout_paper(), notes)


def _as_json(found: dict[str, Any]) -> str:
    import json

    return json.dumps(found, indent=2) + "\n"


# The model.


def _shape(options: Options, spec: ClusterFile | None) -> Shape:
    """The model's shape, from exactly one of the four ways of naming one."""
    sizes = {name: value for name, value in options.sizes.items() if value is not None}
    ways = {
        "--model-size": options.model_size,
        "--model": options.model,
        "--model-config": options.model_config,
        " ".join(f"--{name.replace('_', '-')}" for name in sizes): sizes or None,
    }
    given = [way for way, value in ways.items() if value is not None]
    if not given:
        raise UsageError(
            "no model to plan for",
            hint=(
                "say --model-size 100B, --model llama-3-70b, --model-config config.json, or "
                "--layers and --hidden"
            ),
        )
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} each describe a model", hint="keep one of them")
    training = spec.job.training if spec else None
    seq_len = options.seq_len or (training.seq_len if training else None)
    if options.seq_len is not None and options.seq_len < 1:
        raise UsageError(f"--seq-len {options.seq_len} is not a length", hint="such as 4096")
    if options.model_size is not None:
        return shape_for_size(parse_count(options.model_size), seq_len=seq_len, vocab=options.vocab)
    if sizes:
        missing = [name for name in ("layers", "hidden") if name not in sizes]
        if missing:
            raise UsageError(
                f"{given[0]}: --{' and --'.join(missing)} missing",
                hint="a model's sizes are at least --layers and --hidden",
            )
        return shape_from_sizes(
            layers=sizes["layers"],
            hidden=sizes["hidden"],
            heads=sizes.get("heads"),
            kv_heads=sizes.get("kv_heads"),
            ffn_hidden=sizes.get("ffn_hidden"),
            vocab=options.vocab,
            seq_len=seq_len,
            experts=sizes.get("experts", 0),
            experts_per_token=sizes.get("experts_per_token"),
        )
    if options.vocab is not None and options.vocab < 1:
        raise UsageError(f"--vocab {options.vocab} is not a vocabulary", hint="such as 128256")
    if options.model_config is not None:
        from dtrain.parallelism.model.huggingface import shape_from_config

        shape = _parsed(options.model_config, shape_from_config)
    else:
        from dtrain.parallelism.model.models import model

        shape = model(options.model or "")
    return replace(shape, seq_len=seq_len or shape.seq_len, vocab=options.vocab or shape.vocab)


# Where.


@dataclass(slots=True)
class _Where:
    """The cluster, from options, else the cluster file, else 8 hosts of 8 A100s."""

    options: Options
    spec: ClusterFile | None
    table: Hardware
    overruled: list[str] = field(default_factory=list)
    source: str = ""

    def cluster(self) -> Cluster:
        options = self.options
        chosen = (options.gpus, options.gpu, options.gpus_per_host, options.network_gbps)
        if self.spec is None:
            if all(value is None for value in chosen):
                self.source = "assumed: give a cluster file, or --gpus and --gpu, for yours"
            gpu = self.table.gpu(options.gpu or USUAL_GPU)
            per_host = options.gpus_per_host
            usual = per_host or self.table.machine(gpu.machine).gpus_per_host
            gpus = USUAL_HOSTS * usual if options.gpus is None else options.gpus
            if self.source == "" and (options.gpus is None or options.gpu is None):
                assumed = [f"--gpus {gpus}"] * (options.gpus is None)
                assumed += [f"--gpu {gpu.name}"] * (options.gpu is None)
                self.source = f"assumed: {', '.join(assumed)}"
            return self.table.cluster(
                gpu, gpus, gpus_per_host=per_host, network_gbps=options.network_gbps
            )
        return self._of_file(self.spec)

    def _of_file(self, spec: ClusterFile) -> Cluster:
        options, name = self.options, str(self.options.file)
        self.source = f"from {name}"
        hosts = spec.cluster.hosts
        per_host = options.gpus_per_host
        gpus = options.gpus
        if per_host is None:
            counts = sorted({len(host.gpus) for host in hosts})
            if len(counts) > 1:
                raise UsageError(
                    f"{name}: hosts have {', '.join(map(str, counts[:-1]))} and {counts[-1]} GPUs, "
                    "and a layout needs as many on each",
                    hint=f"list equal hosts alone, or plan for --gpus-per-host {counts[0] or 1}",
                )
            per_host = counts[0]
            if not per_host and gpus is None:
                raise UsageError(
                    f"{name}: its hosts have no GPUs, and layouts are planned for GPUs",
                    hint="set cluster.gpus, or say --gpus and --gpus-per-host",
                )
        if gpus is None:
            gpus = len(hosts) * per_host
        gpu_name = options.gpu or spec.cluster.gpu
        if gpu_name is None:
            raise UsageError(
                f"{name} does not say which GPU its hosts have",
                hint=f"add 'gpu: {USUAL_GPU}' to cluster, or say --gpu {USUAL_GPU}",
            )
        gbps = spec.cluster.gbps if options.network_gbps is None else options.network_gbps
        for name_of_option, value, of_file in (
            ("--gpu", options.gpu, spec.cluster.gpu),
            ("--gpus", options.gpus, sum(len(host.gpus) for host in hosts)),
            ("--network-gbps", options.network_gbps, spec.cluster.gbps),
        ):
            if value is not None and of_file is not None and value != of_file:
                self.overruled.append(f"{name_of_option} {value} goes before {of_file} of {name}")
        cluster = self.table.cluster(
            self.table.gpu(gpu_name), gpus, gpus_per_host=per_host or None, network_gbps=gbps
        )
        if gbps is None and cluster.hosts > 1:
            self.overruled.append(
                f"{name} has no network.gbps: {cluster.network * 8:g} Gb/s is usual for "
                f"{cluster.gpu.name}"
            )
        return cluster


def _spec(path: Path | None) -> ClusterFile | None:
    if path is None:
        return None
    from dtrain.spec.load import read

    # What the file says of how to split is what a plan is to say anew.
    return read(path, without=("strategy", "layout", "roles"))


def _table(path: Path | None) -> Hardware:
    return hardware() if path is None else _parsed(path, hardware().extended)


def _efficiency(options: Options, cluster: Cluster) -> Efficiency:
    from dtrain.parallelism.cluster.efficiency import of_family

    made = of_family(cluster.gpu.family)
    if options.calibrate is None:
        return made
    from dtrain.parallelism.cluster.calibration import read

    return _parsed(
        options.calibrate,
        lambda text, where: read(text, where, made, cluster.gpu, cluster.network),
    )


def _parsed(path: Path, parse: Callable[[str, str], _T]) -> _T:
    """What ``parse`` makes of a user's file and its name. Raises UsageError."""
    return parse(_text(path), str(path))


def _text(path: Path) -> str:
    """A user's own file of UTF-8. Raises UsageError."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MAX_FILE + 1)
    except UnicodeDecodeError:
        raise UsageError(f"{str(path)!r} is not a text file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(
            f"{str(path)!r} cannot be read: {(reason or str(error)).lower()}"
        ) from None
    if len(text) > MAX_FILE:
        raise UsageError(f"{str(path)!r} is too large: more than {MAX_FILE >> 20} MiB")
    return text


# How.


def _precision(options: Options, spec: ClusterFile | None, gpu: Gpu) -> tuple[Precision, str]:
    """Of the computation, and a note where it was not a choice."""
    training = spec.job.training if spec else None
    wanted = options.precision or (training.precision if training else None)
    if wanted == "tf32" and options.precision is None:
        wanted = "fp32"
    if wanted is None:
        if "bf16" in gpu.flops:
            return "bf16", ""
        first: Precision = next(one for one in PRECISIONS if one in gpu.flops)
        return first, f"{gpu.name} does not multiply in bf16: planned for {first}"
    for precision in PRECISIONS:
        if precision == wanted:
            gpu.peak(precision)
            return precision, ""
    raise UsageError(
        f"--precision {wanted} is not one of {', '.join(PRECISIONS)}",
        hint="bf16 is usual; fp8 needs an H100 or newer",
    )


def _batch(
    options: Options, spec: ClusterFile | None, shape: Shape, cluster: Cluster
) -> tuple[int, str]:
    """Sequences in a step, and where that comes from."""
    if options.global_batch is not None:
        if options.global_batch < 1:
            raise UsageError(
                f"--global-batch {options.global_batch} is not a batch", hint="at least 1 sequence"
            )
        return options.global_batch, ""
    training = spec.job.training if spec else None
    if training and training.global_batch:
        return training.global_batch, f"from {options.file}"
    batch = usual_batch(shape.seq_len, cluster.gpus)
    return batch, "assumed: --global-batch sets another"


# Files.


def _write_cluster_file(
    answer: Answer, path: Path, template: Path | None, spec: ClusterFile | None
) -> str:
    """Write the best layout into the file at ``path``; returns what was done, for people.

    A file that is not there yet becomes ``template``'s copy, or a new one.
    """
    from dtrain.spec.edit import new_file, write_layout
    from dtrain_cli.files import read_text, write_text

    if not answer.fits:
        raise UsageError(
            f"no layout fits, so nothing is written to {str(path)!r}",
            hint="leave --output out to see what would fit",
        )
    layout, training, strategy = _written(answer, spec)
    before = read_text(path)
    base, name = before, str(path)
    if base is None and template is not None:
        base, name = read_text(template), str(template)
    if base is None:
        cluster = answer.question.cluster
        width = max(2, len(str(cluster.hosts)))
        text = new_file(
            [f"gpu{number:0{width}}" for number in range(1, cluster.hosts + 1)],
            cluster.gpus_per_host,
            layout,
            training,
            gpu=cluster.gpu.name,
            gbps=cluster.network * 8,
            strategy=strategy,
            file=name,
        )
    else:
        text = write_layout(base, layout, training, strategy=strategy, file=name)
    write_text(path, text)
    return (
        f"{path}: a new cluster file; its hosts and script are placeholders to change"
        if base is None
        else f"{path}: job.layout, job.training and job.strategy set"
    )


def _written(
    answer: Answer, spec: ClusterFile | None
) -> tuple[dict[str, object], dict[str, object], str]:
    """The keys of the layout and the training that go into a cluster file, and the strategy."""
    # Only here: a plan that is not written down needs nothing of cluster files.
    from dtrain.runtime.layout import Layout as LaunchLayout
    from dtrain.spec.layouts import strategy_of

    layout, plain = answer.best.layout, Layout()
    always: tuple[str, ...] = (
        "tensor",
        "pipeline",
        "data",
        "sharding",
        "micro_batch",
        "grad_accumulation",
    )
    if layout.tensor > 1:
        # A strategy may take it for granted, where a plan has decided against it.
        always += ("sequence_parallel",)
    values: dict[str, Any] = {
        name: getattr(layout, name)
        for name in (
            "tensor", "pipeline", "virtual_pipeline", "context", "expert", "data", "sharding",
            "shard", "micro_batch", "grad_accumulation", "recompute", "sequence_parallel",
            "offload",
        )
        if name in always or getattr(layout, name) != getattr(plain, name)
    }  # fmt: skip
    training: dict[str, object] = {
        "global_batch": layout.global_batch,
        "precision": _kept(layout.precision, spec),
        "seq_len": answer.question.shape.seq_len,
    }
    return values, training, strategy_of(LaunchLayout(**values))


def _kept(precision: str, spec: ClusterFile | None) -> str:
    """``tf32`` where a file says so: it is planned for as fp32."""
    now = spec.job.training.precision if spec and spec.job.training else None
    return "tf32" if now == "tf32" and precision == "fp32" else precision
