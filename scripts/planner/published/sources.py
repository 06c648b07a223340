"""What a row's source says about it: who measured it, and the defaults of their software."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from dtrain.parallelism.assumptions import FLASH_1, TRITON_ATTENTION, MemoryHabits
from dtrain.parallelism.backends import TRANSFORMER_ENGINE
from dtrain.parallelism.cluster.hardware import Precision
from dtrain.parallelism.model.adapters import Lora
from dtrain.runtime.layout import BackendName, Recompute, Sharding
from planner.published.rows import Row, count

Counter = Literal["allocated", "reserved", "total"]
"""Source of a memory peak: PyTorch's allocated or reserved bytes, or the driver's total."""


_MEGATRON = MemoryHabits()


@dataclass(frozen=True, slots=True)
class Practice:
    """Defaults of a source's software that its table does not give."""

    sharding: Sharding = "optimizer"
    precision: Precision = "bf16"
    flash_attention: bool = True
    sequence_parallel: bool = True
    hardware_flops: bool = False
    """Whether TFLOP/s of runs with full recomputation count it."""
    always_shards: bool = False
    """Whether optimizer states in bf16 runs are sharded even at ZeRO stage 0, as DeepSpeed's
    ``BF16_Optimizer`` does."""
    counter: Counter = "total"
    seq_len: int | None = None
    fp32_gradients: bool = True
    """Whether 16-bit gradients are accumulated and reduced in 32 bits."""
    fused_loss: bool = False
    loss_bytes: float | None = None
    repeats_loss: bool = False
    separate_kernels: bool = False
    """Whether runs without ``torch.compile`` have a kernel for each operation of a norm."""
    fuses_gradients: bool = True
    overlaps_reduction: bool = True
    gathers_after: bool = False
    gathers_late: bool = False
    flash2: bool | None = None
    early_attention: float = 1.0
    idle: float = 0.0
    expert_kernels: int = 0
    module_work: float = 0.0
    """Both as in `Assumptions`."""
    reduces_to_all: bool = False
    hides_tensor: bool = False
    hides_exchange: bool = False
    whole_experts: bool = True
    balanced: bool = False
    """Whether its benchmarks force the balance of experts."""
    graphs_experts: bool = False
    """Whether steps of its mixtures in fp8 on GB200s and GB300s are one CUDA graph, and tokens are
    exchanged beside the computation."""
    further: tuple[tuple[str, int], ...] = ()
    """Further tokens (MTP) that models predict in pretraining, by a pattern of their names."""
    accumulates: bool = True
    """Whether the sequences of a step are split into micro-batches, if nothing says how many."""
    fp8_params: bool = False
    """Whether fp8's parameters are kept in fp8, and LoRA's frozen matrices too."""
    transformer_engine: bool = True
    """Whether Transformer Engine computes in fp8, if the backend is Megatron-LM."""
    fused_qkv: bool = False
    """Whether queries, keys and values have one adapter: LitGPT's ``LoRAQKVLinear``."""
    tunes_on_squad: bool = False
    """Whether its fine-tuning is measured on the short examples of SQuAD."""
    habits: MemoryHabits = _MEGATRON
    backend: BackendName = "megatron"
    """The planner's backend with the most similar memory rules, overlap and kernels."""
    recompute: Recompute | None = None
    """None: none, or what a run needs to fit its GPUs."""
    narrows_shards: bool = False
    """Whether tensor and pipeline ranks alone train in 32 bits, without FSDP."""
    sustained: float = 1.0
    """Speed of its GPUs in matrix products, as a fraction of other GPUs of that name."""


LORA = Lora(16, "attention")
"""The adapters of published runs with LoRA: Megatron-Bridge adapts queries, keys and values."""
_EARLY = Practice(
    "none", "fp16", False, False, True, fuses_gradients=False, overlaps_reduction=False,
)  # fmt: skip
"""Megatron-LM until 2022, before flash attention and sequence parallelism. Data parallelism reduces
in fp16."""
_DEEPSPEED = replace(
    _EARLY,
    always_shards=True,
    habits=MemoryHabits(
        both_gradients=True, step_copies=2, keeps_outputs=True, context=1.6, buckets=1.0
    ),
)  # fmt: skip
_MEGATRON_DEEPSPEED = replace(_DEEPSPEED, idle=0.011)
"""Until 2022. Each layer and micro-batch takes about 11 ms more than in Megatron-LM. The value is
from MT-NLG's three step times (arXiv 2201.11990, section 2.3), which are not in the tables here."""
_MEGATRON_DEEPSPEED_2023 = replace(
    _DEEPSPEED, precision="bf16", flash_attention=True, flash2=True, separate_kernels=True,
    reduces_to_all=True,
)  # fmt: skip
"""With flash attention: Llama's norms and rotations are PyTorch's, and gradients are reduced after
the last backward pass, to all ranks."""
_MEGATRON_DEEPSPEED_ZERO = replace(_MEGATRON_DEEPSPEED_2023, fp32_gradients=False)
"""The same at ZeRO stage 1 and higher, which sums gradients in the parameters' 16 bits unless
``grad_accum_dtype`` is set (``get_data_types`` in ``deepspeed/runtime/engine.py``)."""
_RECENT = Practice(module_work=TRANSFORMER_ENGINE)
"""Megatron-LM since 2023: Transformer Engine, distributed optimizer, flash attention, sequence
parallel."""
_NEMO = replace(_RECENT, fp32_gradients=False, hides_tensor=True, balanced=True)
"""NeMo's configurations set grad_sync_dtype to bf16, and Megatron-Bridge's scripts/performance
grad_reduce_in_fp32 to False. Both force the balance of experts, as AutoModel's benchmarks do."""
_BRIDGE = replace(_NEMO, further=((r"deepseek.?v[34]", 1), (r"nemotron.?3.?(super|ultra)", 2)))
"""The recipes of Megatron-Bridge (``perf_recipes``). The FLOPs of a token that its tables print are
those of models with these further tokens."""
_BRIDGE_2606 = replace(_BRIDGE, graphs_experts=True)
"""Since release 26.06, recipes for mixtures in mxfp8 have ``cuda_graph_impl`` full_iteration and
``overlap_moe_expert_parallel_comm``."""
_MLPERF = replace(_NEMO, module_work=0.0, fp8_params=True)
"""NVIDIA's submissions, which others take over, start kernels as CUDA graphs, and set NeMo's
``fp8_params`` if they use fp8."""
_NEMO_ON_SQUAD = replace(_NEMO, tunes_on_squad=True, whole_experts=False)
"""Its recipes of 2024 and 2025 leave the size of the experts' tensor parallelism at its default."""
_NEMO_ON_A100 = replace(_NEMO, flash_attention=False)
"""NeMo's tables of GPT-3 on A100s are from before it had flash attention, in 2023."""
_XLA = Practice(
    "full", fp32_gradients=False, fused_loss=True, accumulates=False, transformer_engine=False,
    habits=MemoryHabits(foreach=False, placed=True),
)  # fmt: skip
"""JAX: the compiler fuses operations, those of the loss and of Adam too, and overlaps traffic, much
as Megatron-LM's kernels do. Gradients are those of the 16-bit copies that it gathers."""
PRACTICES = (
    # Vendors measure it, too.
    (r"MaxText|Paxml|JAX-Toolbox", _XLA),
    (r"SC21|2104\.04473", _EARLY),
    # The paper that introduced sequence parallelism. Its full recomputation runs do not use it.
    # Neither has an overlapped reduction.
    (
        r"2205\.05198|Reducing Activation",
        Practice("none", "fp16", False, overlaps_reduction=False),
    ),
    (
        r"Megatron-DeepSpeed|BLOOM|BigScience|2211\.05100|MT-NLG|Turing|2201\.11990|GLM-130B",
        _MEGATRON_DEEPSPEED,
    ),
    (r"vTrain|DeepSpeed|metaseq", _DEEPSPEED),
    # It sums gradients in ``no_sync``, reduces them in 32 bits (``default_mp_policy``), updates
    # with a fused Adam, gathers the tensor ranks' logits, and does not cast them for the loss.
    (
        r"KempnerForge",
        Practice(
            "full",
            separate_kernels=True,
            backend="torchtitan",
            loss_bytes=8,
            habits=MemoryHabits(
                whole_gradients=True,
                wide_sums=True,
                gathers_logits=True,
                fused_adam=True,
            ),
        ),
    ),
    # Megatron-LM of 2021, and OneFlow's model of the same shape and options.
    (r"DLPerf", _EARLY),
    # FlagScale of 2023, a fork of Megatron-LM from before Megatron-Core (``model/transformer.py``),
    # and Megatron-Core 0.6, in NVIDIA's images of PyTorch 23.09 and 24.02, whose scripts do not set
    # TORCH_NCCL_AVOID_RECORD_STREAMS.
    (
        r"FlagPerf .*(-flagscale|llama2_70B-megatron)/",
        Practice(
            loss_bytes=10,
            habits=MemoryHabits(fused_gate=False, repeats_keys=True, records_streams=True),
        ),
    ),
    (
        r"FlagPerf .*-megatron/",
        Practice(loss_bytes=10, habits=MemoryHabits(records_streams=True)),
    ),
    # A fork of Megatron-LM of 2024. Its scripts overlap tensor-parallel traffic with products, but
    # do not set --overlap-grad-reduce.
    (r"Megatron-Kwai", Practice(overlaps_reduction=False, hides_tensor=True)),
    # A program in C++ and CUDA with a kernel for each group of operations. It computes the loss in
    # chunks, and all its states have 16 bits.
    (
        r"llmq (benchmarks/|README)",
        Practice(
            fp32_gradients=False,
            fused_loss=True,
            transformer_engine=False,
            habits=MemoryHabits(placed=True, recomputes_activation=True),
        ),
    ),
    # Its memory has the softmax's 5·a·s² bytes. Megatron-LM reports the allocator's peak
    # (``report_memory``).
    (r"Zero Bubble|2401\.10241", Practice("none", "bf16", False, counter="allocated")),
    (r"deepseek-ai/|2412\.19437", Practice(hides_exchange=True)),
    # From 2023: sequence_parallel is off in its configurations; tensor parallelism is
    # Megatron-LM's. Its ZeRO optimizer (``hybrid_zero_optim.py``) reduces 16-bit gradients to all
    # ranks.
    (
        r"InternEvo",
        Practice(
            sequence_parallel=False,
            hardware_flops=True,
            fp32_gradients=False,
            fuses_gradients=False,
            # Its documentation installs version 1.0.5.
            early_attention=FLASH_1,
            gathers_after=True,
            reduces_to_all=True,
            habits=MemoryHabits(step_copies=10, fullest="last"),
        ),
    ),
    # Megatron-Bridge and AutoModel measure fine-tuning on whole sequences of mock data.
    (r"NVIDIA/NeMo\b|dgxc", _NEMO_ON_SQUAD),
    (r"MLPerf", _MLPERF),
    (r"Megatron-Bridge docs/performance-summary(\.md|.*\[26\.(0[6-9]|1\d))", _BRIDGE_2606),
    (r"Megatron-Bridge docs/performance-summary", _BRIDGE),
    (r"NVIDIA[-/ ]NeMo", _NEMO),
    # The benchmarks of its own repositories: Megatron-LM, and the libraries that follow it.
    (r"^NVIDIA", replace(_RECENT, hides_tensor=True, balanced=True)),
    (r"nanotron", Practice(flash2=True, habits=MemoryHabits(unfused=True, fullest="first"))),
    # Its library (Aleph-Alpha/scaling, released a year after the paper) consists of PyTorch's
    # modules. Gradients stay in 16 bits and are summed over all ranks after the last backward
    # pass. Copies of them in 32 bits come after the activations are gone. Sequence parallelism is
    # off by default. ``TransformerLMHead`` gathers the logits, and two buffers keep them
    # (``PipelineScheduleTrain``).
    (
        r"Aleph.?Alpha|Efficient Parallelization Layouts|2311\.05610",
        Practice(
            sequence_parallel=False,
            fp32_gradients=False,
            separate_kernels=True,
            fuses_gradients=False,
            overlaps_reduction=False,
            reduces_to_all=True,
            habits=MemoryHabits(
                frees_gradients=True,
                keeps_outputs=True,
                gathers_logits=True,
                unfused=True,
                fullest="inner",
            ),
        ),
    ),
    # Its configurations of that time have a fused norm.
    (r"torchtitan docs/performance", Practice("full", counter="reserved", backend="torchtitan")),
    (
        # ``ActivationCheckpoint.mode`` is selective. Until April 2026 (pull request 2900),
        # ``maybe_enable_amp`` left out mixed precision if others than FSDP split a model.
        r"torchtitan",
        Practice(
            "full",
            recompute="selective",
            narrows_shards=True,
            counter="reserved",
            separate_kernels=True,
            backend="torchtitan",
            # The default since February 2025 (pull request 881). It makes no difference before.
            habits=MemoryHabits(fused_adam=True),
        ),
    ),
    # Its configuration compiles the model (use_torch_compile) and reduces in bf16 (bfSixteen).
    (r"fms-fsdp", Practice("full", fp32_gradients=False, backend="torchtitan")),
    # Its models' loss_fn is fused_crossentropy (flash-attn's kernel), unless a file changes it.
    # Their attn_impl was triton until FlashAttention-2. Composer's default is BACKWARD_POST
    # (``composer/utils/parallelism.py``), and the benchmarks do not change it.
    (
        r"llm-foundry|MosaicML",
        Practice(
            "full",
            early_attention=TRITON_ATTENTION,
            fused_loss=True,
            repeats_loss=True,
            gathers_late=True,
            backend="torchtitan",
            habits=MemoryHabits(foreach=False),
        ),
    ),
    # It also publishes its GPUs' speed in plain matrix products: 48 % of the peak, not 60 %.
    (
        r"SimuMax.*b200",
        Practice(counter="allocated", seq_len=4096, sustained=0.8, overlaps_reduction=False),
    ),
    # The sequence length in its configurations, which agrees with the memory of the rows.
    (r"SimuMax", Practice(counter="allocated", seq_len=4096, overlaps_reduction=False)),
)
_UNKNOWN = Practice(
    separate_kernels=True, fuses_gradients=False, flash2=True, habits=MemoryHabits(unfused=True)
)
"""Software that no text names: split like Megatron-LM, but with PyTorch's kernels, because few have
fused ones, which are faster and keep less for the backward pass."""
_PADDLE = replace(
    _UNKNOWN,
    separate_kernels=False,
    overlaps_reduction=False,
    habits=MemoryHabits(unfused=True, copies_inputs=True),
)
"""PaddleNLP, whose configurations fuse the norms. Its sharding reduces gradients after the last
backward pass and sends parameters after the step, and waits for both (``sync_op=True`` in
``dygraph_sharding_optimizer.py``; the overlap of stage 2 is off by default)."""
_FSDP = Practice("full", separate_kernels=True, backend="torchtitan")
"""PyTorch's FSDP around modules of PyTorch."""
_MODULES = replace(_FSDP, sharding="none")
"""PyTorch's modules without sharding."""
_HUGGING_FACE = replace(
    _MODULES,
    sequence_parallel=False,
    expert_kernels=54,
    habits=MemoryHabits(
        whole_gradients=True,
        gathers_logits=True,
        keeps_inputs=True,
        repeats_keys=True,
        fixed_segments=True,
    ),
)
"""Fine-tuning with Hugging Face's models and trainers, whose FSDP is FSDP1. Until Transformers 5,
mixtures such as ``Qwen3MoeSparseMoeBlock`` loop over their experts: three kernels that find an
expert's tokens, the MLP's five, and four that gather, weight and add up. ``nonzero``, which finds
the tokens, waits for the GPU, and the backward pass sorts their indices: ``expert_kernels`` is from
the eight runs of TRL with FSDP2. Their tensor parallelism gathers the logits (``colwise_rep``, the
output layer's entry in a model's ``_tp_plan``)."""
_TORCHTUNE = replace(_FSDP, habits=MemoryHabits(fused_adam=True))
"""The optimizer of its configurations is ``AdamW(fused=True)``."""
_LITGPT = replace(
    _FSDP,
    fused_qkv=True,
    habits=MemoryHabits(
        whole_gradients=True,
        flat_adapters=True,
        frozen_inputs=2,
        repeats_keys=True,
        fixed_segments=True,
    ),
)
"""LitGPT wraps whole blocks in FSDP1. It requires bitsandbytes 0.42."""
_ZERO = replace(
    _FSDP, sequence_parallel=False, fp32_gradients=False, expert_kernels=100,
    habits=replace(_FSDP.habits, keeps_outputs=True, fused_adam=True, offloads="gradients"),
)  # fmt: skip
"""DeepSpeed since 2023, with models of PyTorch's modules: ZeRO-3 reduces in 16 bits. Its hooks run
for each expert's three matrices: ``expert_kernels`` is from two runs of TRL."""
_ZERO_2 = replace(
    _ZERO, gathers_after=True, habits=replace(_ZERO.habits, step_copies=2, buckets=1.0)
)
"""Stages 1 and 2, which flatten and cast all gradients at once. Stage 3 does so group by group.
``buckets``: 5e8 gradients in 16 bits, DeepSpeed's default (``reduce_bucket_size``)."""
_SHARDING_SOFTWARE = (
    r"(?<!Megatron.)\bFSDP2?\b|\btorch ?titan\b|\bOLMo\b"
    r"|llm[- ]foundry|\bComposer\b|\bLightning\b|\bLingua\b"
)
SOFTWARE = (
    (r"Megatron[- ]DeepSpeed", _MEGATRON_DEEPSPEED),
    (r"NeoX|\bDeepSpeed|OpenRLHF|Colossal", _DEEPSPEED),
    (r"\bNeMo\b|Megatron[- ]Bridge", _NEMO),
    (r"Paddle", _PADDLE),
    (r"\btorch ?tune\b", _TORCHTUNE),
    # It reports ``max_memory_reserved``, and leaves PyTorch's allocator as it is.
    (r"\bprime-rl\b", replace(_FSDP, counter="reserved", habits=MemoryHabits(fixed_segments=True))),
    (r"lightning-thunder", replace(_LITGPT, loss_bytes=8)),
    (r"\blit[- ]?(gpt|llama)\b", _LITGPT),
    (r"Hugging ?Face|\bAccelerate\b|\bTRL\b|Axolotl|fsdp_qlora", _HUGGING_FACE),
    (_SHARDING_SOFTWARE, _FSDP),
    (r"MaxText|Levanter|\bJAX\b|\bAlpa\b|\bXLA\b|\bTPU", _XLA),
    (r"Megatron|\bm-?core\b|\bveScale\b|MegaScale|Fast-LLM", _RECENT),
    (r"ms-swift|\bPEFT\b|LLaMA[- ]?Factory|unsloth", _HUGGING_FACE),
)
"""The software that a row may name in any of its texts, if its source is not in `PRACTICES`."""


def practice_of(row: Row) -> Practice:
    """The defaults of the software that trained a row's model.

    Its source decides, or else the first text that names software, or else its age: sharded
    parameters are FSDP's; fp16 without flash attention is from before 2023; states that all have
    16 bits are those of PyTorch's modules, as is what is not split.
    """
    source = row.get("source", "")
    texts = (source, f"{row.get('id', '')} {row.get('notes', '')}", row.get("gpu_type", ""))
    for table, searched in ((PRACTICES, texts[:1]), (SOFTWARE, texts)):
        for text in searched:
            for pattern, how in table:
                if re.search(pattern, text, re.IGNORECASE):
                    # Hugging Face's trainers have ZeRO from DeepSpeed only.
                    zero = re.fullmatch(r"zero-?[123]", row.get("sharding", ""), re.IGNORECASE)
                    if (zero and how is _HUGGING_FACE) or (how is _DEEPSPEED and _new(row)):
                        return _ZERO if zero_3(row.get("sharding", "")) else _ZERO_2
                    if how is _MEGATRON_DEEPSPEED and _flash(row):
                        zero = re.search(r"zero-?[123]", row.get("sharding", ""), re.IGNORECASE)
                        return _MEGATRON_DEEPSPEED_ZERO if zero else _MEGATRON_DEEPSPEED_2023
                    early = how in (_NEMO, _NEMO_ON_SQUAD, _MLPERF) and not _new(row)
                    return _NEMO_ON_A100 if early else how
    sharding = row.get("sharding", "")
    if re.search(r"fsdp|hsdp|zero.?3|full|hybrid", sharding, re.IGNORECASE):
        return _FSDP
    if re.match("n", row.get("flash_attention", ""), re.IGNORECASE) and re.search(
        r"fp16|float16|half", row.get("precision", ""), re.IGNORECASE
    ):
        return _DEEPSPEED if re.match("zero", sharding, re.IGNORECASE) else _EARLY
    if re.search(r"16-true", row.get("precision", "")):
        return _MODULES
    return _UNKNOWN if any((count(row, one) or 1) > 1 for one in ("tp", "pp")) else _MODULES


def zero_3(text: str) -> bool:
    """Whether a text names a sharding of the parameters."""
    return re.search(r"\b(ZeRO-?3|FSDP)", text, re.IGNORECASE) is not None


def _flash(row: Row) -> bool:
    return re.match("y", row.get("flash_attention", ""), re.IGNORECASE) is not None


def _new(row: Row) -> bool:
    """Whether a run is from 2023 or later, by its attention, its GPU or its model."""
    newer = r"H[128]\d\d|H20\b|B[123]00|MI[23]\d\d|Gaudi"
    models = r"llama|vicuna|mi[sx]tral|qwen|baichuan|internlm|deepseek|gemma|\bphi-|\byi-|olmo|grok"
    return (
        _flash(row)
        or re.search(newer, row.get("gpu_type", ""), re.IGNORECASE) is not None
        or re.search(models, row.get("model_name", ""), re.IGNORECASE) is not None
    )


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
