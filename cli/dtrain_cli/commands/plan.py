"""`dtrain plan`: how to split a model over a cluster."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from dtrain import api
from dtrain.diagnostics import ExitCode, UsageError
from dtrain.parallelism.answer.alternatives import faster_backend, hidden_exchange, whole_graph
from dtrain.parallelism.cluster.hardware import PRECISIONS
from dtrain.parallelism.question import Answer
from dtrain.planning.request import FIXABLE, MODEL_SIZES, PlanRequest
from dtrain.planning.written import written
from dtrain.runtime.layout import BackendName, Recompute, Sharding
from dtrain_cli import completion, prompt
from dtrain_cli.completion import one_of
from dtrain_cli.options import as_options, errors_name_options
from dtrain_cli.output import notice, stdout_paper, write
from dtrain_cli.parameters import Settings, argument, flag, option

if TYPE_CHECKING:
    from dtrain.parallelism.tensorflow.verdict import TensorFlowPlan

_WRITTEN = {("job", name) for name in ("layout", "training", "strategy", "expected")}
"""The keys that `--output` sets."""


def plan(
    file: Annotated[
        Path | None,
        argument("A cluster file: its hosts, GPUs and network.", "FILE", completion.cluster_files),
    ] = None,
    settings: Settings = None,
    model_size: Annotated[
        str | None, option("Model: parameter count; uses a standard shape.", "100B")
    ] = None,
    model: Annotated[
        str | None, option("Model: name of a known model.", "NAME", completion.models)
    ] = None,
    model_config: Annotated[
        Path | None, option("Model: a Hugging Face config.json.", "FILE")
    ] = None,
    layers: Annotated[int | None, option("Model: layers.")] = None,
    hidden: Annotated[int | None, option("Model: hidden size.")] = None,
    heads: Annotated[int | None, option("Model: attention heads.")] = None,
    kv_heads: Annotated[int | None, option("Model: key and value heads.")] = None,
    ffn_hidden: Annotated[
        int | None, option("Model: inner width of the MLP, or of one expert.")
    ] = None,
    experts: Annotated[int | None, option("Model: experts in each layer.")] = None,
    experts_per_token: Annotated[int | None, option("Model: experts per token.")] = None,
    mtp: Annotated[
        int | None, option("Further tokens that each position predicts (MTP); default: 0.")
    ] = None,
    vocab: Annotated[int | None, option("Vocabulary size.")] = None,
    seq_len: Annotated[int | None, option("Tokens in one sequence.")] = None,
    global_batch: Annotated[
        int | None, option("Sequences in one step; default: by the model's size.")
    ] = None,
    lora_rank: Annotated[
        int | None, option("Train only adapters (LoRA) of this rank.", "N")
    ] = None,
    lora_targets: Annotated[
        str | None,
        option(
            "With --lora-rank: adapters of all matrices or of attention's; default: all.",
            "KIND",
            one_of("all", "attention"),
        ),
    ] = None,
    base_bits: Annotated[
        int | None,
        option("With --lora-rank: bits of frozen weights, 16, 8 (fp8) or 4 (QLoRA); default: 16."),
    ] = None,
    tokens: Annotated[
        str | None, option("Tokens to train on: shows days and GPU-hours.", "2T")
    ] = None,
    failure_rate: Annotated[
        float | None, option("With --tokens: failures per 1,000 node-days; default: 3.8.")
    ] = None,
    restart_minutes: Annotated[
        float | None, option("With --tokens: minutes from a failure to the next step; default: 10.")
    ] = None,
    storage_gbs: Annotated[
        float | None, option("With --tokens: GB/s of checkpoints; default: 1 for each host.")
    ] = None,
    price_per_gpu_hour: Annotated[
        float | None, option("With --tokens: price of one GPU for an hour; shows the total.")
    ] = None,
    precision: Annotated[
        str | None, option("bf16, fp16, fp8, nvfp4, tf32 or fp32.", "NAME", one_of(*PRECISIONS))
    ] = None,
    state_bits: Annotated[
        int | None,
        option(
            "Bits of weights and Adam's states, 32 or 16 (no copy in 32); default: from FILE, "
            "else 32."
        ),
    ] = None,
    overlap_experts: Annotated[
        bool | None,
        flag("Software that computes while experts exchange tokens; default: from FILE, else not."),
    ] = None,
    cuda_graph: Annotated[
        bool | None,
        flag("Software with one CUDA graph of a whole step; default: from FILE, else not."),
    ] = None,
    gpus: Annotated[int | None, option("Cluster: total number of GPUs.")] = None,
    gpu: Annotated[
        str | None, option("Cluster: GPU model, such as h100-80gb.", "NAME", completion.gpus)
    ] = None,
    gpus_per_host: Annotated[int | None, option("Cluster: GPUs per host.")] = None,
    network_gbps: Annotated[
        float | None, option("Cluster: Gb/s per host, all NICs together.")
    ] = None,
    rack_hosts: Annotated[int | None, option("Cluster: hosts of a rack, with --rack-gbps.")] = None,
    rack_gbps: Annotated[
        float | None, option("Cluster: Gb/s of a host to other racks, with --rack-hosts.")
    ] = None,
    hardware: Annotated[Path | None, option("JSON table of your own GPUs.", "FILE")] = None,
    calibrate: Annotated[
        Path | None, option("JSON file with measured efficiencies.", "FILE")
    ] = None,
    probe: Annotated[
        bool, flag("Measure FILE's GPUs (or CPUs) first, for about a minute.", "--probe")
    ] = False,
    trials: Annotated[
        int,
        option(
            "Train the N best layouts for a few steps on FILE's hosts, and rank them by that.", "N"
        ),
    ] = 0,
    calibrate_run: Annotated[
        list[str] | None,
        option("Learn the machines' speed from this run; repeatable.", "RUN", completion.runs),
    ] = None,
    tensor: Annotated[int | None, option("Only: GPUs that split a layer.")] = None,
    pipeline: Annotated[int | None, option("Only: pipeline stages.")] = None,
    virtual_pipeline: Annotated[int | None, option("Only: pieces of a stage.")] = None,
    context: Annotated[int | None, option("Only: GPUs that split a sequence.")] = None,
    expert: Annotated[int | None, option("Only: GPUs that share experts.")] = None,
    data: Annotated[int | None, option("Only: data ranks.")] = None,
    sharding: Annotated[
        str | None,
        option(
            "Only: none, optimizer, gradients, full or hybrid.", "KIND", one_of(*get_args(Sharding))
        ),
    ] = None,
    micro_batch: Annotated[int | None, option("Only: sequences in a micro-batch.")] = None,
    recompute: Annotated[
        str | None, option("Only: none, selective or full.", "KIND", one_of(*get_args(Recompute)))
    ] = None,
    sequence_parallel: Annotated[
        bool | None, flag("Only: with (without) sequence parallelism beside tensor parallelism.")
    ] = None,
    offload: Annotated[
        bool | None, flag("Only: with (without) the optimizer in the hosts' memory.")
    ] = None,
    framework: Annotated[
        str | None,
        option(
            "torch or tensorflow; default: from FILE, else torch.",
            "NAME",
            one_of("torch", "tensorflow"),
        ),
    ] = None,
    backend: Annotated[
        str | None,
        option(
            "Backend: runtime, megatron or torchtitan; default: from FILE, else runtime, "
            "unless another is much faster.",
            "NAME",
            one_of(*get_args(BackendName)),
        ),
    ] = None,
    top: Annotated[int, option("Layouts to compare.")] = 8,
    json: Annotated[bool, flag("Print one JSON object.", "--json")] = False,
    output: Annotated[
        Path | None, option("Write the best layout into this cluster file.", "FILE")
    ] = None,
    html: Annotated[Path | None, option("Write an HTML page with charts.", "FILE")] = None,
) -> None:
    """Choose how to split a model over a cluster: memory, speed, and why.

    Give the model in one way: --model-size, --model, --model-config, or --layers and --hidden.
    Options override FILE's values; without both, the cluster is 8 hosts of 8 A100-80GB. Options
    marked "Only" narrow the search; with all sizes fixed, dtrain evaluates that one layout.
    The exit code is 1 if no layout fits.
    """
    given = locals()  # the options, which have the names of the request's fields
    if top < 1:
        raise UsageError(f"--top {top} shows nothing", hint="at least 1")
    composed = {"settings", "sizes", "fixed", "calibrate_runs"}
    request = PlanRequest(
        **{one.name: given[one.name] for one in fields(PlanRequest) if one.name not in composed},
        settings=settings or (),
        sizes={name: given[name] for name in MODEL_SIZES},
        fixed={name: given[name] for name in FIXABLE if given[name] is not None},
        calibrate_runs=calibrate_run or (),
    )
    if output is not None or html is not None:
        from dtrain_cli.files import HTML, writable

        for target, begins in ((output, ""), (html, HTML)):
            if target is not None:
                writable(target, begins)
    with errors_name_options(), _uncollected():
        answer = api.plan(
            request, strategies=True, ask=prompt.asker(), on_notice=notice, signals=True
        )
    if isinstance(answer, Answer):
        with _uncollected():
            write(_layouts(answer, top, settings, json=json, file=file, output=output, html=html))
    else:
        for name, path in (("--output", output), ("--html", html)):
            if path is not None:
                raise UsageError(
                    f"{name} applies only to torch layouts",
                    hint="set job.strategy in the cluster file to the strategy that is shown",
                )
        write(_strategies(answer, json=json))
    if not answer.fits:
        raise typer.Exit(ExitCode.JOB_FAILED)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Stop Python's search for cycles of garbage. A planner's search makes hundreds of thousands of
    objects, of which hardly any is garbage: looking for it takes a tenth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _layouts(
    answer: Answer,
    top: int,
    settings: list[str] | None,
    *,
    json: bool,
    file: Path | None,
    output: Path | None,
    html: Path | None,
) -> str:
    """Write the requested files, and return the text for stdout."""
    # Each output imports what it needs: most plans read and write no file.
    others = (faster_backend(answer), hidden_exchange(answer), whole_graph(answer))
    notes = (*answer.notes, *filter(None, others))
    done: list[str] = []
    if output is not None:
        done.append(_write_layout(answer, output, file, settings or ()))
    if html is not None:
        from dtrain_cli.files import write_text
        from dtrain_cli.views.layouts_html import page

        write_text(html, page(answer, count=top, notes=notes))
        done.append(f"{html}: a page with charts")
    if json:
        from dtrain.parallelism.answer.document import document

        return _as_json(document(answer, top, [*notes, *done]))
    from dtrain_cli.views import layouts

    return layouts.as_text(answer, stdout_paper(), count=top, notes=notes, written=done)


def _write_layout(answer: Answer, output: Path, file: Path | None, settings: Sequence[str]) -> str:
    """Write the best layout into ``output``, and return what was written. A new file starts as a
    copy of ``file``."""
    from dtrain.spec.edit import UnfitFileError
    from dtrain.spec.settings import key_of
    from dtrain_cli.files import read_text, write_text

    if not answer.fits:
        return f"{output}: nothing, because no layout fits"
    source, base = output, read_text(output)
    if base is None and file is not None:
        source, base = file, read_text(file)
    try:
        text = written(answer, base, file=str(source))
    except UnfitFileError as error:
        if not settings:
            raise
        note = "`--output` does not write the values of --set; the file may need them"
        raise UsageError(error.message, hint=f"{error.hint}\n{note}".strip()) from None
    write_text(output, text)
    what = (
        "a new cluster file; change its placeholder hosts and script"
        if base is None
        else "job.layout, job.training, job.strategy and job.expected set"
    )
    keys = dict(map(key_of, settings))
    left = ", ".join(key for key, parts in keys.items() if parts[:2] not in _WRITTEN)
    if left:
        what += f"; not the --set values of {left}: give them to `dtrain launch`, too"
    return f"{output}: {what}; the script must apply the layout (`dtrain help torch`)"


def _strategies(found: TensorFlowPlan, *, json: bool) -> str:
    if json:
        return _as_json(found.to_document())
    from dtrain_cli.views import strategies

    return strategies.as_text(found, stdout_paper())


def _as_json(found: dict[str, Any]) -> str:
    return as_options(dumps(found, indent=2)) + "\n"
