"""Converts published training runs to the planner's terms.

A row of the CSV files is what a public table reports about one measured run: model, GPUs, layout,
and results. Blank cells are filled by rules that hold for all rows of a source: from the row's
notes, the model's name (``published_shapes``), the defaults of that source's software at the time
(``PRACTICES``), or the machine in which the GPU usually comes.

The columns:

- ``n_gpus``, ``tp``, ``pp``, ``cp``: blank means 1, but a blank ``n_gpus`` is their product. Data
  ranks are n / (tp·pp·cp); ``dp`` is needed only if ``n_gpus`` does not determine it. Experts are
  spread over data ranks, so ``ep`` does not count.
- ``micro_batch``: blank means 1. ``global_batch``: if blank, the notes give the micro-batches of a
  step (``mbc=``, ``micro_num``, ``grad_accum=``). Otherwise a rate such as tokens/s is still
  comparable, with four micro-batches for each pipeline stage, but a step time is not.
- ``sharding``: DDP is none; ZeRO-1 and the distributed optimizer are ``optimizer``; ZeRO-2 and
  SHARD_GRAD_OP ``gradients``; ZeRO-3 and FSDP ``full``; HSDP ``hybrid``. Blank is the default of
  the source's software.
- ``precision``: fp8, bf16, fp16 or fp32, in this order, if the cell names it. Gradients have 16
  bits with fp16, with MosaicML's PURE and in NeMo.
- ``recompute``: full, uniform, block or just yes mean full; blank means none.
- ``interconnect``: Gb/s of all NICs of one host. ``8x200Gb/s`` is 1600, ``400Gb/s per GPU`` counts
  for each GPU, a machine's name or a blank means that machine. An InfiniBand rate without a unit of
  reference is the rate of one NIC.
- ``reported_*``: see ``_seconds`` and ``_reported_memory``. A row whose notes start with OOM did
  not fit. Every other row with a result did fit, if the memory of its GPU is known.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from dtrain.diagnostics import UsageError
from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cluster.efficiency import Efficiency
from dtrain.parallelism.cluster.hardware import Gpu, GpuCluster, Precision, hardware
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.cost.speed import Speed, speed
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import BackendName, Layout, Recompute, Schedule, Sharding
from planner.published_shapes import Row, UnusableError, count, number, shape_of

Counter = Literal["allocated", "reserved", "total"]
"""Source of a memory peak: PyTorch's allocated or reserved bytes, or the driver's total."""


@dataclass(frozen=True, slots=True)
class Practice:
    """Defaults of a source's software that its table does not give."""

    sharding: Sharding = "optimizer"
    precision: Precision = "bf16"
    flash_attention: bool = True
    sequence_parallel: bool = True
    hardware_flops: bool = False
    """Whether TFLOP/s of runs with full recomputation count it."""
    counter: Counter = "total"
    seq_len: int | None = None
    fp32_gradients: bool = True
    """Whether 16-bit gradients are accumulated and reduced in 32 bits."""
    fused_loss: bool = False
    backend: BackendName = "megatron"
    """The planner's backend with the most similar memory rules, overlap and kernels."""


_DEEPSPEED = Practice("none", "fp16", False, False, True)
PRACTICES = (
    # Before flash attention and sequence parallelism; data parallelism reduces in fp16.
    (r"SC21|2104\.04473", Practice("none", "fp16", False, False, True)),
    # The paper that introduced sequence parallelism. Its full recomputation runs do not use it.
    (r"2205\.05198|Reducing Activation", Practice("none", "fp16", False)),
    # Megatron-DeepSpeed and related software of 2021 and 2022.
    (r"vTrain|DeepSpeed|BLOOM|BigScience|2211\.05100|2201\.11990|NeoX|metaseq", _DEEPSPEED),
    # Its memory has the softmax's 5·a·s² bytes.
    (r"Zero Bubble|2401\.10241", Practice("none", "bf16", False)),
    # From 2023: sequence_parallel is off in its configurations; tensor parallelism is
    # Megatron-LM's.
    (r"InternEvo", Practice(sequence_parallel=False, hardware_flops=True)),
    # Its configurations set grad_sync_dtype to bf16.
    (r"NVIDIA/NeMo|dgxc", Practice(fp32_gradients=False)),
    (r"torchtitan", Practice("full", counter="reserved", backend="torchtitan")),
    # Its models' loss_fn is fused_crossentropy (flash-attn's kernel), unless a file changes it.
    (r"llm-foundry|MosaicML", Practice("full", fused_loss=True, backend="torchtitan")),
    # The sequence length in its configurations, which agrees with the memory of the rows.
    (r"SimuMax", Practice(counter="allocated", seq_len=4096)),
)
_RECENT = Practice()
"""Megatron-LM and NeMo since 2023: distributed optimizer, flash attention, sequence parallel."""


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run."""

    name: str
    publisher: str
    """Who measured it. Held-out tests leave out all runs of a publisher."""
    table: str
    """The publisher's table that contains the run."""
    shape: Shape
    layout: Layout
    assumed: Assumptions
    cluster: GpuCluster
    seconds: float | None
    """Seconds of one step with the layout's global batch."""
    memory: float | None
    """Peak memory in GiB."""
    counter: Counter
    fitted: bool | None
    """Whether it ran without running out of memory; None if the GPU's memory is unknown."""

    def candidate(self, efficiency: Efficiency) -> Candidate:
        """The planner's estimate."""
        return Candidate(self.shape, self.layout, self.cluster, efficiency, self.assumed)


def rows(path: Path) -> list[dict[str, str]]:
    """A file's rows. Missing columns and cells read as blanks.

    Raises:
        UsageError: the file cannot be read, or has no such columns at all.
    """
    try:
        text = path.read_text("utf-8-sig", errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint="give a CSV file") from None
    reader = csv.DictReader(text.splitlines(keepends=True), restkey="rest", restval="")
    columns = {(name or "").strip() for name in reader.fieldnames or ()}
    if not {"source", "gpu_type"} <= columns:
        raise UsageError(
            f"{path}: the first line has no columns source and gpu_type",
            hint="the format is that of tests/parallelism/data/published_runs.csv",
        )
    found = []
    try:
        for row in reader:
            cells = {key.strip(): value.strip() for key, value in row.items()
                     if isinstance(key, str) and isinstance(value, str)}  # fmt: skip
            found.append(cells)
    except csv.Error as error:
        raise UsageError(f"{path}:{reader.line_num}: {error}", hint="give a CSV file") from None
    return found


def read(path: Path) -> Iterator[Run | str]:
    """The runs of a file; for each unusable row, the reason.

    Raises:
        UsageError: as ``rows`` does.
    """
    for row in rows(path):
        try:
            yield run_of(row)
        except UnusableError as error:
            yield str(error)


@cache
def origin(source: str) -> tuple[str, str]:
    """Publisher and table of a ``source`` cell.

    ``owner/repo path/stem.md [A100 80GB with …] @commit row 7`` is ``owner/repo`` and
    ``stem A100 80GB``; of papers, the title is the publisher and there is one table.
    """
    bracket = re.search(r"\[(.+?)( with .*)?\]", source)
    text = re.sub(r"\(.*?\)|\[.*?\]|\S*@\S*", " ", source)
    text = re.split(r";|\brows?\b|\blines?\b", text)[0]
    text = re.split(r"\b(?:Tables? \d|Fig(?:ure)?\.? \d|[Ss]ec(?:tion)?\.? |App\.)", text)[0]
    parts = text.split()
    if not parts:
        return "unnamed", "unnamed"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", parts[0]):
        title = " ".join(parts)
        return title, title
    paths = [place for place, part in enumerate(parts) if place and re.search(r"/|\.\w+$", part)]
    stem, after = "", parts[1:]
    if paths:
        *folders, file = parts[paths[-1]].split("/")
        after = parts[paths[-1] + 1 :]
        stem = re.sub(r"\.\w+$", "", file)
        if stem.casefold() == "readme" and not bracket:
            stem = folders[-1] if folders else ""
    if bracket and stem.casefold() == "readme":
        stem = ""
    plain = [word for word in after if word.isalpha()][:3]
    table = " ".join([parts[0], stem, *plain, bracket[1] if bracket else ""])
    return parts[0], " ".join(table.split())


def run_of(row: Row) -> Run:
    """Convert a row to the planner's terms.

    Raises:
        UnusableError: the row cannot be compared with an estimate. The reason groups such rows.
    """
    notes, source = row.get("notes", ""), row.get("source", "")
    practice = next((how for pattern, how in PRACTICES if re.search(pattern, source)), _RECENT)
    gpu = gpu_of(row.get("gpu_type", ""), row.get("interconnect", ""))
    layout, known_batch = _layout(row, practice)
    assumed = _assumptions(row, practice, gpu)
    shape = shape_of(row, tensor=layout.tensor, seq_len=practice.seq_len)
    if layout.pipeline > shape.layers:
        raise UnusableError("the pipeline has more stages than the model has layers")
    layout = _scheduled(row, layout, shape)
    cluster = _cluster(row, gpu, layout)
    publisher, table = origin(source)
    failed = re.match(r"\W*(oom\b|out of memory)", notes, re.IGNORECASE) is not None
    seconds = None if failed else _seconds(row, practice, shape, layout, assumed, cluster)
    no_batch = seconds is not None and not known_batch and not _has_rate(row)
    if no_batch:
        seconds = None
    memory, counter = (None, practice.counter) if failed else _reported_memory(row, practice)
    if not failed and seconds is None and memory is None:
        raise UnusableError(
            "the global batch of a step time is not given" if no_batch else "nothing is reported"
        )
    unsaid = re.search(r"memory size[^;.]*not stated", notes, re.IGNORECASE) or re.fullmatch(
        # These were sold with 40 or 80, and with 16 or 32 GB.
        r"(nvidia\W*)?(a100|v100)\W*(sxm\d?|pcie)?",
        row.get("gpu_type", ""),
        re.IGNORECASE,
    )
    # The planner does not model activations that move to host memory.
    moved = re.search(r"activation\w* (cpu )?offload\s*=\s*(true|yes|1)", notes, re.IGNORECASE)
    return Run(
        name=row.get("id", ""),
        publisher=publisher,
        table=table,
        shape=shape,
        layout=layout,
        assumed=assumed,
        cluster=cluster,
        seconds=seconds,
        memory=None if moved else memory,
        counter=counter,
        fitted=None if unsaid or moved else not failed,
    )


def gpu_of(name: str, interconnect: str = "") -> Gpu:
    """The GPU with any of the names that tables use.


    Raises:
        UnusableError: the planner does not know it.
    """
    try:
        gpu = _gpu(name)
    except UsageError:
        raise UnusableError(f"the GPU is not known: {name or 'blank'}") from None
    if re.search(r"\bpcie\b", interconnect, re.IGNORECASE) and not re.search(
        r"nvlink|nvswitch", interconnect, re.IGNORECASE
    ):
        # Sometimes only the interconnect column identifies the board.
        try:
            return hardware().gpu(re.sub(r"^(\w+?)-", r"\1-pcie-", gpu.name))
        except UsageError:
            return gpu
    return gpu


@cache
def _gpu(name: str) -> Gpu:
    table = hardware()
    plain = re.sub(r"\(.*?\)|\bdgx\b|\bhgx\b|\bnvidia\b", " ", name, flags=re.IGNORECASE).strip()
    for written in (name, plain, re.sub(r"[\s,]+", "-", plain)):
        try:
            return table.gpu(written)
        except UsageError:
            continue
    # By model, board and memory, in any order, with other words in between.
    model = re.search(
        r"\b(?:[ahlvbtp]\d{1,3}[a-z]?|gh200|gb200|gb300|mi\d{3}x?|rtx\W?\w+)\b", name.casefold()
    )
    if model is None:
        return table.gpu(name)
    board = "-pcie" if "pcie" in name.casefold() else ""
    size = re.search(r"(\d+)\s*g", name.casefold())
    for written in ([f"{model[0]}{board}-{size[1]}gb"] if size else []) + [f"{model[0]}{board}"]:
        try:
            return table.gpu(written)
        except UsageError:
            continue
    return table.gpu(model[0])


def _layout(row: Row, practice: Practice) -> tuple[Layout, bool]:
    """The layout, and whether the row gives the sequences of a step."""
    notes, recompute = row.get("notes", ""), _recompute(row)
    tensor, pipeline = count(row, "tp") or 1, count(row, "pp") or 1
    context = count(row, "cp") or 1
    gpus = count(row, "n_gpus") or tensor * pipeline * context * (count(row, "dp") or 1)
    data, rest = divmod(gpus, tensor * pipeline * context)
    if rest or not data or gpus > 10**6:
        raise UnusableError("the GPUs do not divide by the split")
    text = f"{row.get('id', '')} {notes}"
    micro = count(row, "micro_batch") or _noted(text, r"mbs\s*[=:]?\s*(\d+)") or 1
    batch = count(row, "global_batch")
    steps = _noted(
        text,
        r"mbc\s*[=:]?\s*(\d+)",
        r"micro_num\s*[=:]?\s*(\d+)",
        r"(?:grad_accum\w*|gradient accumulation\w*)\s*[=:]?\s*(\d+)",
        r"(\d+) micro-?batches",
    )
    if batch is not None:
        if batch < data:
            raise UnusableError("the global batch has fewer sequences than data ranks")
        micro = min(micro, batch // data)
        accumulation = max(1, round(batch / (data * micro)))
    else:
        accumulation = steps or 4 * (pipeline if pipeline > 1 else 1)
    sharding = _sharding(row, practice)
    if re.search(r"no sequence parallel", notes, re.IGNORECASE):
        sequence = False
    else:
        said_so = re.search(r"sequence[- ]parallel", notes, re.IGNORECASE)
        sequence = practice.sequence_parallel or said_so is not None
    # The number of ranks that share the states, if not all data ranks do.
    group = _noted(notes, r"shard(?:ing)? group\w*\s*[=:]?\s*(\d+)", r"dp_shard\s*[=:]?\s*(\d+)")
    shard = group if group and group < data * context else None
    if sharding == "hybrid" and not shard:
        shard = min(data, max(1, (count(row, "gpus_per_node") or 8) // tensor))
    offload = re.search(
        r"(optimizer|zero)[-\w ]*offload(?!\w*\s*=\s*(false|no|0))", notes, re.IGNORECASE
    )
    layout = Layout(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=(count(row, "vpp") or 1) if pipeline > 1 else 1,
        context=context,
        expert=count(row, "ep") or 1,
        data=data,
        sharding=sharding,
        shard=shard,
        micro_batch=micro,
        grad_accumulation=accumulation,
        recompute=recompute,
        sequence_parallel=sequence and tensor > 1,
        offload=offload is not None,
        backend=practice.backend,
    )
    return layout, batch is not None or steps is not None


def _assumptions(row: Row, practice: Practice, gpu: Gpu) -> Assumptions:
    precision = _precision(row, practice, gpu)
    flash = {"y": True, "n": False}.get(
        row.get("flash_attention", "").casefold()[:1] if not _unknown(row) else "",
        practice.flash_attention,
    )
    return Assumptions(
        precision=precision,
        flash_attention=flash,
        fused_loss=practice.fused_loss,
        fp32_gradients=practice.fp32_gradients
        and precision != "fp16"
        and "PURE" not in row.get("precision", ""),
    )


def _unknown(row: Row) -> bool:
    return row.get("flash_attention", "").casefold() in ("", "unknown", "not stated", "n/a", "?")


def _noted(text: str, *patterns: str) -> int | None:
    """The number that the first matching pattern captures."""
    for pattern in patterns:
        if found := re.search(pattern, text, re.IGNORECASE):
            return int(found[1]) or None
    return None


_SHARDINGS: tuple[tuple[str, Sharding], ...] = (
    (r"hsdp|hybrid", "hybrid"),
    (r"grad_op|gradients|zero.?2|stage.?2|os\+g", "gradients"),
    (r"zero.?3|stage.?3|fsdp|full|zero\+\+", "full"),
    (r"zero.?1|stage.?1|optimizer|dist.?opt|zero", "optimizer"),
    (r"none|^no\b|ddp|replicat|zero.?0|^0$", "none"),
)


def _sharding(row: Row, practice: Practice) -> Sharding:
    text = row.get("sharding", "").casefold()
    if text:
        for pattern, sharding in _SHARDINGS:
            if re.search(pattern, text):
                return sharding
    return practice.sharding


def _recompute(row: Row) -> Recompute:
    text = row.get("recompute", "").casefold()
    if not text:
        match = re.search(
            r"(full|selective)[ _-](?:recompute|ac\b|activation)|recompute[ _=]+(full|selective)",
            f"{row.get('id', '')} {row.get('notes', '')}".casefold(),
        )
        text = (match[1] or match[2]) if match else ""
    if re.match(r"sel|per.?op|op\b|attn|attention|core", text):
        return "selective"
    if text in ("", "none", "no", "off", "false", "0", "unknown", "n/a", "-"):
        return "none"
    return "full"


def _precision(row: Row, practice: Practice, gpu: Gpu) -> Precision:
    text = row.get("precision", "").casefold()
    if re.search(r"fp4|int8|int4", text):
        raise UnusableError(f"the precision is not known: {text}")
    precision = practice.precision
    # fp32 last: notes on mixed precision often also name the 32-bit parts.
    names: tuple[tuple[str, Precision], ...] = (
        (r"fp8|float8", "fp8"),
        (r"bf16|bfloat16", "bf16"),
        (r"fp16|float16|half", "fp16"),
        (r"fp32|float32|tf32", "fp32"),
    )
    for pattern, named in names:
        if re.search(pattern, text):
            precision = named
            break
    if precision in ("bf16", "fp16") and precision not in gpu.flops:
        precision = "fp16" if "fp16" in gpu.flops else "bf16"
    if precision not in gpu.flops:
        raise UnusableError(f"{gpu.name} does not support {precision}")
    return precision


_SCHEDULES: dict[str, Schedule] = {
    "1f1b": "1f1b", "interleaved": "1f1b", "1f1bi": "1f1b", "gpipe": "1f1b",
    "zbv": "zb-v", "zb1p": "zb-1p", "zbh1": "zb-1p", "zb2p": "zb-2p", "zbh2": "zb-2p",
}  # fmt: skip


def _scheduled(row: Row, layout: Layout, shape: Shape) -> Layout:
    """The layout with the schedule from the notes, and at most as many experts and chunks as exist.

    The interleaved runs of Zero Bubble (arXiv 2401.10241, section 5) have a chunk for each layer.
    """
    named = re.search(r"schedule[ :=]+([\w-]+)", row.get("notes", ""), re.IGNORECASE)
    key = re.sub(r"[^a-z0-9]", "", named[1].casefold()) if named else "1f1b"
    if key not in _SCHEDULES:
        if re.match(r"v(half|min)|dualpipe|zb", key):
            raise UnusableError(f"the planner has no schedule {named[1] if named else key}")
        key = "1f1b"
    chunks = layout.virtual_pipeline
    if key in ("1f1bi", "interleaved") and chunks == 1 and layout.pipeline > 1:
        chunks = -(-shape.layers // layout.pipeline)
    return replace(
        layout,
        schedule=_SCHEDULES[key],
        virtual_pipeline=max(1, min(chunks, -(-shape.layers // layout.pipeline))),
        expert=max(1, min(layout.expert, shape.experts)),
    )


def _cluster(row: Row, gpu: Gpu, layout: Layout) -> GpuCluster:
    usual = hardware().machine(gpu.machine)
    per_host = count(row, "gpus_per_node") or usual.gpus_per_host
    gbps = network_gbps(row.get("interconnect", ""), per_host)
    if gbps is None:
        gbps = usual.network_gbps * per_host / usual.gpus_per_host
    gpus = layout.world_size
    return GpuCluster(gpu=gpu, gpus=gpus, gpus_per_host=min(per_host, gpus), network=gbps / 8)


_RATE = r"([\d.]+)\s*(T|G)(b|B)(?:it|yte)?(?:ps|/s|it/s)?"


def network_gbps(text: str, gpus_per_host: int) -> float | None:
    """Gb/s of one host, all NICs together, from a table's text about the network, if it has it."""
    if several := re.search(rf"(\d+)\s*[x×*]\s*{_RATE}", text):
        return int(several[1]) * _gbps(several[2], several[3], several[4])
    for found in re.finditer(_RATE, text):
        rate, after = _gbps(*found.groups()), text[found.end() :].casefold()
        before = text[: found.start()].casefold().rpartition(";")[2]
        clause = f"{before} {after.partition(';')[0]}"
        if re.search(r"nvlink|nvswitch|\bpcie", clause):
            continue
        if re.search(r"per (gpu|nic|rank|card)|/gpu", clause):
            return rate * gpus_per_host
        if re.search(r"per (node|host|server|machine)|/node|ethernet", clause) or rate > 800:
            return rate
        # An InfiniBand rate alone is one port's; such hosts have a port for each GPU.
        return rate * gpus_per_host if re.search(r"\bib\b|infiniband|hdr|ndr", clause) else rate
    for machine in hardware().machines:
        for name in (machine.name, *machine.aliases):
            if len(name) > 2 and re.search(rf"\b{re.escape(name)}\b", text.replace(" ", "-"), re.I):
                return machine.network_gbps * gpus_per_host / machine.gpus_per_host
    return None


def _gbps(number_text: str, prefix: str, unit: str) -> float:
    try:
        rate = float(number_text)
    except ValueError:
        rate = 0.0
    return max(rate * (1000 if prefix == "T" else 1) * (8 if unit == "B" else 1), 1e-3)


_RATES = (
    "reported_tokens_per_s_per_gpu",
    "reported_tflops_per_gpu",
    "reported_mfu_pct",
    "reported_hfu_pct",
)


def _has_rate(row: Row) -> bool:
    return any(number(row, column) is not None for column in _RATES)


def _seconds(
    row: Row,
    practice: Practice,
    shape: Shape,
    layout: Layout,
    assumed: Assumptions,
    cluster: GpuCluster,
) -> float | None:
    """Seconds of one step, from the most direct reported figure.

    In this order: the step's time; tokens/s; TFLOP/s; MFU; HFU, all per GPU. FLOP are model FLOP,
    with attention over the whole square (72·B·L·s·h²(1 + s/(6h) + V/(12·h·L)), RAR), unless the
    notes say hardware FLOP or causal. For the Megatron family of 2021 and 2022 and for InternEvo,
    TFLOP/s with full recomputation are hardware FLOP (SC21 eq. 3). MFU is relative to the dense
    peak of the run's precision.
    """
    notes = row.get("notes", "")
    if (seconds := number(row, "reported_step_time_s")) is not None:
        batch = count(row, "global_batch") or layout.global_batch
        return seconds * layout.global_batch / batch
    # The other figures are rates: compute them for a step of one second.
    unit: Speed = speed(shape, layout, cluster, assumed, 1.0)
    peak = cluster.gpu.flops[assumed.precision]
    causal = re.search(r"(?<!non-)(?<!non )\bcausal", notes, re.IGNORECASE) is not None
    mfu = unit.mfu_causal if causal else unit.mfu
    if (tokens := number(row, "reported_tokens_per_s_per_gpu")) is not None:
        return unit.tokens_per_s_per_gpu / tokens
    if (tflops := number(row, "reported_tflops_per_gpu")) is not None:
        counted = re.search(r"(hardware|model) T?FLOP", notes, re.IGNORECASE)
        every = practice.hardware_flops and layout.recompute == "full"
        if counted:
            every = counted[1].casefold() == "hardware"
        return (unit.hfu if every else mfu) * peak / tflops
    for column, share in (("reported_mfu_pct", mfu), ("reported_hfu_pct", unit.hfu)):
        if (percent := number(row, column)) is not None:
            return share / (percent if percent <= 1 else percent / 100)
    return None


def _reported_memory(row: Row, practice: Practice) -> tuple[float | None, Counter]:
    """GiB at the peak, and which counter reported it.

    The notes override the source's default: torchtitan prints the allocator's reserved bytes,
    SimuMax its allocated bytes; other sources are assumed to use the driver's figure. GB are GiB
    unless the notes call them decimal: PyTorch and nvidia-smi count in powers of two.
    """
    notes = row.get("notes", "").casefold()
    counter: Counter = practice.counter
    if re.search(r"\breserved", notes):
        counter = "reserved"
    elif re.search(r"\ballocated", notes):
        counter = "allocated"
    elif re.search(r"nvidia-smi|driver", notes):
        counter = "total"
    peak = number(row, "reported_peak_mem_gb")
    if peak is not None and re.search(r"decimal gb|10\^9 bytes|1e9 bytes", notes):
        peak *= 1e9 / 2**30
    return peak, counter
