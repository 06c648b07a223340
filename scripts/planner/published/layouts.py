"""The layout and the precision of a published run, from its cells and its notes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from dtrain.parallelism.assumptions import (
    COMPILED_LOSS,
    FLASH_1,
    TRITON_ATTENTION,
    UNTRAINED,
    Assumptions,
    communicator,
    fp8_copies,
)
from dtrain.parallelism.backends import BACKENDS
from dtrain.parallelism.cluster.hardware import Gpu, Precision
from dtrain.parallelism.model.adapters import Lora
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import Layout, Recompute, Schedule, Sharding
from planner.published.experts import capacity, expert_ranks, sends_copies, whole_experts
from planner.published.rows import Row, UnusableError, count, noted
from planner.published.sharding import keeps_gathered, sharding_of
from planner.published.sources import LORA, Practice, zero_3


def layout_of(row: Row, practice: Practice) -> tuple[Layout, bool]:
    """The layout, and whether the row gives the sequences of a step."""
    notes, recompute = row.get("notes", ""), _recompute(row) or practice.recompute or "none"
    tensor, pipeline = count(row, "tp") or 1, count(row, "pp") or 1
    context = count(row, "cp") or 1
    gpus = count(row, "n_gpus") or tensor * pipeline * context * (count(row, "dp") or 1)
    data, rest = divmod(gpus, tensor * pipeline * context)
    if rest or not data or gpus > 10**6:
        raise UnusableError("the GPUs do not divide by the split")
    text = f"{row.get('id', '')} {notes}"
    micro = (said := _micro_batch(row)) or 1
    batch = count(row, "global_batch")
    steps = noted(
        text,
        r"mbc\s*[=:]?\s*(\d+)",
        r"micro_num\s*[=:]?\s*(\d+)",
        r"(?:grad_accum\w*|gradient accumulation\w*)\s*[=:]?\s*(\d+)",
        r"(\d+) micro-?batches",
    )
    sharding = sharding_of(row, practice)
    if batch is not None:
        if batch < data:
            raise UnusableError("the global batch has fewer sequences than data ranks")
        sharded = practice.backend != "megatron" and sharding in ("full", "hybrid")
        if sharded and not (said or steps) and pipeline == 1:
            # Each micro-batch would gather the parameters again.
            micro = batch // data
        micro = min(micro, batch // data)
        accumulation = max(1, round(batch / (data * micro)))
    elif practice.accumulates or steps or count(row, "micro_batch"):
        accumulation = steps or 4 * (pipeline if pipeline > 1 else 1)
    else:
        micro, accumulation = 4, 1
    if re.search(r"no sequence parallel|sequence parallelism off", notes, re.IGNORECASE):
        sequence = False
    else:
        said_so = re.search(r"sequence[- ]parallel", notes, re.IGNORECASE)
        sequence = practice.sequence_parallel or said_so is not None
    # The number of ranks that share the states, if not all data ranks do.
    group = noted(notes, r"shard(?:ing)? group\w*\s*[=:]?\s*(\d+)", r"dp_shard\s*[=:]?\s*(\d+)")
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
        expert=expert_ranks(row, practice),
        data=data,
        sharding=sharding,
        shard=shard,
        micro_batch=micro,
        grad_accumulation=accumulation,
        recompute=recompute,
        sequence_parallel=sequence and tensor > 1,
        offload=offload is not None,
        compile=re.search(r"\bcompiled?\b(?! loss)", _said(row), re.IGNORECASE) is not None,
        backend=practice.backend,
    )
    return layout, batch is not None or steps is not None


def is_given(row: Row, shape: Shape, layout: Layout, *, known_batch: bool) -> bool:
    """Whether the row itself gives the whole layout and the batch, and no rule fills in any of
    them: the tensor, pipeline and context ranks (one of these cells, or sharded parameters without
    any), the expert ranks of a mixture, the sharding, the micro-batch, the batch of a step and the
    recomputation. One data rank has nothing to shard, and one GPU nothing to split.
    """
    alone = layout.world_size == 1
    notes = f"{row.get('id', '')} {row.get('notes', '')}"
    return (
        known_batch
        and _recompute(row) is not None
        and (alone or layout.shards_parameters or any(row.get(one) for one in ("tp", "pp", "cp")))
        and (alone or not shape.experts or count(row, "ep") is not None)
        and (layout.copies == 1 or row.get("sharding", "").casefold() not in _BLANK)
        and (
            count(row, "micro_batch") is not None
            or layout.global_batch == layout.data
            or noted(notes, r"mbs\s*[=:]?\s*(\d+)") is not None
        )
    )


_FUSED_NORMS = re.compile(
    r"\bcompile|\bLiger|\bfused (?:kernels|norms?|rms)|norm kernel|kernels? for (\w+ and )?norms",
    re.IGNORECASE,
)


_BALANCED = re.compile(
    r"forced? (load )?balanc|force-balanced|balanced router|even routing|\bPrimus\b|MoE-ModelZoo",
    re.IGNORECASE,
)
"""Says that experts get equally many tokens, as in the configurations of Primus and of
Megatron-MoE-ModelZoo."""


def _is_graphed(row: Row, gpu: Gpu) -> bool:
    """Whether a run is like those of `Practice.graphs_experts`, and its notes say nothing else.
    Models with state spaces and DeepSeek-V4 have CUDA graphs of parts, or none."""
    other = re.search(r"nemotron|deepseek.?v4", row.get("model_name", ""), re.IGNORECASE)
    said = re.search(r"CUDA graph|recipe of the release", row.get("notes", ""))
    mixture = (count(row, "ep") or 1) > 1
    return mixture and gpu.name in ("gb200", "gb300") and not (other or said)


def _text(row: Row) -> str:
    return f"{row.get('source', '')} {row.get('id', '')} {row.get('notes', '')}"


def _said(row: Row) -> str:
    """A row's text without a statement that nothing is compiled."""
    return re.sub(r"\b(no|not|without) (torch\.)?compil", "", _text(row), flags=re.IGNORECASE)


def assumptions_of(row: Row, practice: Practice, gpu: Gpu) -> Assumptions:
    precision = _precision(row, practice, gpu)
    flash = {"y": True, "n": False}.get(
        row.get("flash_attention", "").casefold()[:1] if not _unknown(row) else "",
        practice.flash_attention,
    )
    # Without compilation, float8 of torchao is slower than bf16.
    compiled = _FUSED_NORMS.search(_said(row)) is not None or precision == "fp8"
    text = _text(row)
    # A compiler has no hooks.
    hooks = BACKENDS[practice.backend].sharding_work if practice.transformer_engine else 0.0
    graphed = practice.graphs_experts and precision == "fp8" and _is_graphed(row, gpu)
    longest_first = "the first batch is the longest" in text
    return Assumptions(
        precision=precision,
        quantized=_quantized(row, practice, precision, gpu),
        narrow_states=_narrow_states(row),
        separate_kernels=(practice.separate_kernels or "norms not fused" in text) and not compiled,
        flash_attention=flash,
        flash2=_flash2(text, practice),
        document=_document(row, practice),
        early_attention=_early_attention(text, practice),
        fused_loss=practice.fused_loss
        or re.search(r"\bLiger\b", row.get("notes", "")) is not None
        or re.search(r"(chunked|fused)\b[^;]*\bcross[- ]entropy", text, re.IGNORECASE) is not None,
        loss_bytes=_loss_bytes(text, practice),
        varied_lengths=re.search(r"lengths of the examples differ", text) is not None,
        repeats_loss=practice.repeats_loss,
        separate_expansion=re.search(r"\bGPTQ\b", text) is not None,
        blocking="CUDA_LAUNCH_BLOCKING=1" in row.get("notes", ""),
        one_graph=graphed
        or re.search(r"graph of the whole step|whole iteration as a CUDA graph", text) is not None,
        expert_kernels=practice.expert_kernels,
        module_work=practice.module_work,
        uneven=0.0 if practice.balanced or _BALANCED.search(text) else UNTRAINED,
        capacity=capacity(text),
        masks_experts="MaxText" in text and capacity(text) > 0,
        room_for_all="MaxText" in text and "dropless" in text,
        communicator=communicator(gpu),
        sharding_work=hooks,
        # They also run on one GPU, where the notes name the sharding.
        host_work=hooks if count(row, "n_gpus") == 1 and zero_3(text) else 0.0,
        fuses_gradients=practice.fuses_gradients,
        overlaps_reduction=practice.overlaps_reduction,
        gathers_after=practice.gathers_after,
        gathers_late=practice.gathers_late,
        idle=practice.idle,
        reduces_to_all=practice.reduces_to_all,
        hides_tensor=practice.hides_tensor,
        hides_exchange=graphed
        or practice.hides_exchange
        or re.search(r"dualpipe|a2a[- ]?overlap|overlap[-_ ]moe", text, re.IGNORECASE) is not None,
        whole_experts=whole_experts(row, practice),
        sends_copies=sends_copies(text),
        habits=replace(
            practice.habits,
            fused_gate=True
            if re.search(r"kernels? for [^;]*SwiGLU", text)
            else practice.habits.fused_gate,
            wide_rest=re.search(r"for k-?bit training|gathered in fp32", text, re.IGNORECASE)
            is not None,
            holds_outputs="holds the outputs" in text,
            gelu_bytes=14.0 if "minGPT" in text else 0.0,
            gathers_fp8="gathered in fp8" in text,
            overwrites_mlp="fused kernels of LoRA" in text,
            recomputes_activation=_recomputes_activation(row, practice),
            recomputes_parts="attention and MLP are recomputed apart" in text,
            repeats_exchange="exchanges tokens again" in text,
            keeps_gathered=keeps_gathered(row, practice)
            or ("mem_efficient_linear=False" in text and _recompute(row) in (None, "none")),
            frozen_inputs=min(practice.habits.frozen_inputs, 1 if longest_first else 2),
            moment_bytes=_moment_bytes(text),
            master_bytes=_master_bytes(text),
        ),
        fp32_gradients=_fp32_gradients(row, practice) and precision != "fp16",
    )


def _fp32_gradients(row: Row, practice: Practice) -> bool:
    """Whether 16-bit gradients are reduced in 32 bits: as the notes say, or the software does."""
    said = re.search(r"gradients are reduced in (\w+)", row.get("notes", ""), re.IGNORECASE)
    if said:
        return said[1].casefold() == "fp32"
    return practice.fp32_gradients and "PURE" not in row.get("precision", "")


def _quantized(row: Row, practice: Practice, precision: Precision, gpu: Gpu) -> float:
    """As in `Assumptions`. The GPU has only the narrow ones if the others are on the host."""
    if precision == "fp8" and re.search(r"offload: master", row.get("notes", "")):
        return -1.0
    if precision != "fp8" or practice.backend != "megatron" or not practice.transformer_engine:
        return 0.0
    return fp8_copies(gpu) - (2.0 if practice.fp8_params else 0.0)


def _recomputes_activation(row: Row, practice: Practice) -> bool | None:
    """As in `MemoryHabits`: the cell may name norms and an activation."""
    cell = row.get("recompute", "")
    activation = re.search(r"(\b|_)act(ivation)?\b|GELU|SwiGLU", cell, re.IGNORECASE)
    if activation and re.search("norm", cell, re.IGNORECASE):
        return True
    if re.search(r"--recompute-activations|selective means core_attn", _text(row)):
        return False
    return practice.habits.recomputes_activation


def _moment_bytes(text: str) -> float:
    """As in `MemoryHabits`."""
    if "Adafactor" in text:
        return 0
    named = re.search(r"Adam's moments in (bf16|fp8)", text)
    return {"bf16": 2, "fp8": 1}[named[1]] if named else 4


def _master_bytes(text: str) -> float:
    """As in `MemoryHabits`."""
    if "no master weights" in text:
        return 0
    return 2 if "16 bits of master weights" in text else 4


def _loss_bytes(text: str, practice: Practice) -> float | None:
    """As in `Assumptions`."""
    if re.search(r"compiled loss", text, re.IGNORECASE):
        return COMPILED_LOSS
    triton = re.search(r"Triton kernels? for (the )?loss", text, re.IGNORECASE)
    if "santacoder" in text:
        # GPTBigCode keeps logits of 16 bits, and copies them. Autocast also casts them to 32.
        wide = "-amp-" in text
        return (14 if triton else 18) if wide else (6 if triton else 8)
    if triton:
        return 8
    return practice.loss_bytes


def _flash2(text: str, practice: Practice) -> bool | None:
    """Whether attention is FlashAttention-2, and not a newer one, if a row names its version."""
    named = re.search(r"flash[- ]?att(?:entio)?n[- ]?v?([234])\b", text, re.IGNORECASE)
    return named[1] == "2" if named else practice.flash2


def _early_attention(text: str, practice: Practice) -> float:
    """As in `Assumptions`."""
    named = {"in Triton": TRITON_ATTENTION, "1": FLASH_1}
    found = (share for version, share in named.items() if f"flash attention {version}" in text)
    return next(found, practice.early_attention)


def loss_chunks(row: Row, shape: Shape) -> int:
    """The parts in which a run computes its loss. Liger's fused output layer has as many as the
    vocabulary is larger than the hidden size (``fused_linear_cross_entropy.py``)."""
    notes = row.get("notes", "")
    if re.search(r"\bLiger\b", notes):
        return -(-shape.vocab // shape.hidden)
    return noted(notes, r"loss in (\d+) chunks") or 1


def _narrow_states(row: Row) -> bool:
    """Whether all states have 16 bits: the precision is ``bf16-true``, as Lightning calls it."""
    return re.search(r"16-true", row.get("precision", ""), re.IGNORECASE) is not None


def lora_of(row: Row, practice: Practice, precision: Precision) -> Lora | None:
    """The adapters of a run with LoRA. Its notes may give their rank, that they are on the MLP, and
    that the frozen matrices have 4 bits."""
    notes = row.get("notes", "")
    text = f"{row.get('source', '')} {row.get('id', '')}"
    if not re.search(r"\blora\b", text, re.IGNORECASE):
        return None
    found = LORA
    if rank := noted(notes, r"LoRA rank (\d+)"):
        mlp = re.search(r"LoRA rank \d+ on (all (matrices|layers)|the MLP)", notes, re.IGNORECASE)
        drops = re.search(r"LoRA[^;]*;?[^;]*dropout of their inputs", notes) is not None
        inputs, output = _dropped(notes, practice) if drops else (0, False)
        found = Lora(rank, "all" if mlp else "attention", dropout=inputs, output_dropout=output)
    if re.search(r"frozen matrices in 4 bits", notes, re.IGNORECASE):
        once = re.search(r"no double quantization", notes, re.IGNORECASE) is not None
        return replace(found, base_bits=4, double_quantized=not once)
    return replace(found, base_bits=8) if practice.fp8_params and precision == "fp8" else found


def _dropped(notes: str, practice: Practice) -> tuple[int, bool]:
    """As `Lora.dropout` and `Lora.output_dropout`, of a run whose adapters have dropout."""
    alone = re.search(r"on queries(, keys)? and values\b", notes)
    inputs = 2 if alone and not alone[1] else 3
    return 1 if practice.fused_qkv else inputs, not alone


SQUAD = 200
"""Approximate tokens of an example of SQuAD: a paragraph of 120 words, a question and an answer."""


def _document(row: Row, practice: Practice) -> int:
    """Tokens of a packed example, or 0. NeMo's fine-tuning is measured on SQuAD, packed to the
    sequence length (NeMo's performance summary; ``SquadDataModule`` in dgxc-benchmarking)."""
    text = " ".join(row.get(column, "") for column in ("source", "model_name", "notes"))
    tuned = re.search(r"fine.?tun|\bSFT\b|\bLoRA\b", text, re.IGNORECASE) is not None
    squad = practice.tunes_on_squad or re.search(r"squad", text, re.IGNORECASE) is not None
    return SQUAD if tuned and squad else 0


_BLANK = ("", "-", "?", "n/a", "unknown", "not stated")


def _unknown(row: Row) -> bool:
    return row.get("flash_attention", "").casefold() in _BLANK


def choices(row: Row, layout: Layout, practice: Practice) -> Iterator[Layout]:
    """Layouts that differ in what the row does not say, starting with the software's default and
    then in the order in which people save memory: sharded optimizer states, tensor parallelism in a
    host if the row gives no split at all, then recomputation, then shorter micro-batches."""
    blank = row.get("sharding", "").casefold() in _BLANK
    states: tuple[Sharding, ...] = (layout.sharding,)
    if blank and layout.sharding == "none":
        states += ("optimizer",)
    recomputes = (layout.recompute,) if _recompute(row) or practice.recompute else _RECOMPUTES
    split = [layout]
    if not any(row.get(column) for column in ("tp", "pp", "cp", "ep")):
        split += _wider(row, layout, practice)
    halves = 1
    while halves <= layout.micro_batch:
        micro = layout.micro_batch // halves
        for recompute, one, state in product(recomputes, split, states):
            steps = one.grad_accumulation
            if row.get("global_batch"):
                steps = round(one.micro_batch * steps / micro)
            found = replace(one, micro_batch=micro, grad_accumulation=steps)
            yield replace(found, sharding=state, recompute=recompute)
        if _micro_batch(row) or (practice.accumulates and not row.get("global_batch")):
            return
        halves *= 2


def _micro_batch(row: Row) -> int | None:
    """The sequences of a micro-batch, if the row gives them."""
    text = f"{row.get('id', '')} {row.get('notes', '')}"
    return count(row, "micro_batch") or noted(text, r"mbs\s*[=:]?\s*(\d+)")


def between(row: Row, layout: Layout) -> tuple[Layout, ...]:
    """Full recomputation, if the row says that experts, MLPs or some layers are recomputed: such a
    run keeps more than that, and less than selective recomputation does."""
    experts = re.search(r"\bmoe\b", row.get("recompute", "")) is not None
    some = re.search(r"checkpointing of some blocks|recomputes ffn", row.get("notes", ""))
    if layout.recompute == "selective" and (experts or some):
        return (replace(layout, recompute="full"),)
    return ()


def _wider(row: Row, layout: Layout, practice: Practice) -> Iterator[Layout]:
    """The same on more tensor ranks, up to a host's GPUs. Sharded parameters need none."""
    for tensor in (2, 4, 8):
        if layout.shards_parameters or layout.data % tensor:
            return
        yield layout_of({**row, "tp": str(tensor)}, practice)[0]


def _recompute(row: Row) -> Recompute | None:
    """How much is computed again, or None if the row does not say it."""
    text = row.get("recompute", "").casefold()
    if text in _BLANK:
        match = re.search(
            r"(full|selective)[ _-](?:recompute|ac\b|activation)|recompute[ _=]+(full|selective)",
            f"{row.get('id', '')} {row.get('notes', '')}".casefold(),
        )
        text = (match[1] or match[2]) if match else ""
    if text in _BLANK:
        return None
    if re.match(r"sel|per.?op|op\b|attn|attention|core", text):
        return "selective"
    return "none" if text in ("none", "no", "off", "false", "0") else "full"


def _precision(row: Row, practice: Practice, gpu: Gpu) -> Precision:
    text = row.get("precision", "").casefold()
    if re.search(r"mxfp4|int8|int4", text):
        raise UnusableError(f"the precision is not known: {text}")
    precision = practice.precision
    # fp32 last: notes on mixed precision often also name the 32-bit parts.
    names: tuple[tuple[str, Precision], ...] = (
        (r"nvfp4", "nvfp4"),
        (r"fp8|float8", "fp8"),
        (r"bf16|bfloat16", "bf16"),
        (r"fp16|float16|^half", "fp16"),
        (r"tf32", "tf32"),
        (r"fp32|float32", "fp32"),
    )
    # Notes without a cell name 32 bits for parts, but fewer bits for products.
    others = f"{row.get('id', '')} {row.get('notes', '')}".casefold()
    searched, names = (text, names) if text not in _BLANK else (others, names[:4])
    for pattern, named in names:
        if re.search(pattern, searched):
            precision = named
            break
    if precision in ("bf16", "fp16") and precision not in gpu.flops:
        precision = "fp16" if "fp16" in gpu.flops else "bf16"
    split = (count(row, "tp") or 1) * (count(row, "pp") or 1)
    if practice.narrows_shards and 1 < split == count(row, "n_gpus"):
        precision = "fp32"
    if precision not in gpu.flops:
        raise UnusableError(f"{gpu.name} does not support {precision}")
    return precision


_RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
_SCHEDULES: dict[str, Schedule] = {
    "1f1b": "1f1b", "interleaved": "1f1b", "1f1bi": "1f1b", "gpipe": "1f1b",
    "zbv": "zb-v", "zb1p": "zb-1p", "zbh1": "zb-1p", "zb2p": "zb-2p", "zbh2": "zb-2p",
    "dualpipe": "zb-1p",
}  # fmt: skip
"""DualPipe has ZB1P's bubble: (p/2 − 1)(F&B + B − 3W) and (p − 1)(F + B − 2W) are both a third of
1F1B's if F = W = B/2 (arXiv 2412.19437, table 2). Its second copy of parameters is not counted."""


def scheduled(row: Row, layout: Layout, shape: Shape) -> Layout:
    """The layout with the schedule from the notes, and at most as many experts and chunks as exist.

    The interleaved runs of Zero Bubble (arXiv 2401.10241, section 5) have a chunk for each layer.
    So do runs whose notes say that their chunks are not stated.
    """
    named = re.search(r"schedule[ :=]+([\w-]+)", row.get("notes", ""), re.IGNORECASE)
    key = re.sub(r"[^a-z0-9]", "", named[1].casefold()) if named else "1f1b"
    if key not in _SCHEDULES:
        if re.match(r"v(half|min)|zb", key):
            raise UnusableError(f"the planner has no schedule {named[1] if named else key}")
        key = "1f1b"
    chunks = layout.virtual_pipeline
    unsaid = re.search(r"chunks( of a stage)? not stated", row.get("notes", "")) is not None
    if (unsaid or key in ("1f1bi", "interleaved")) and chunks == 1 and layout.pipeline > 1:
        chunks = -(-shape.layers // layout.pipeline)
    return replace(
        layout,
        schedule=_SCHEDULES[key],
        virtual_pipeline=max(1, min(chunks, -(-shape.layers // layout.pipeline))),
        expert=max(1, min(layout.expert, shape.experts)),
    )
