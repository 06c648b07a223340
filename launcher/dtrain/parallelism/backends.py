"""Backends: software that trains layouts, its features, and its models of memory and speed."""

from __future__ import annotations

from collections.abc import Iterator

from dtrain.parallelism.cluster.hardware import PRECISIONS, Gpu, Precision
from dtrain.parallelism.model.adapters import Lora
from dtrain.parallelism.model.further import most_stages
from dtrain.parallelism.model.parts import CrossAttention, LayerPart, Modulation, Twin
from dtrain.parallelism.model.shape import Shape
from dtrain.records import dataclass
from dtrain.runtime.layout import BackendName, Layout

TRANSFORMER_ENGINE = 25.0
"""`Assumptions.module_work` of Transformer Engine. On H200s, with micro-batches of 1,024 tokens,
Megatron-Bridge takes 2.9 ms for a layer of Qwen3-4B, forward and backward, of which the GPU
computes for 1.6 ms."""

MEGATRON_FSDP = 25.0
"""`Assumptions.sharding_work` of Megatron-FSDP: with full sharding, the same layer takes 1.7 ms
more than with whole parameters."""
PYTORCH_HOOKS = 57.0
"""`Assumptions.sharding_work` of DeepSpeed's ZeRO-3 (``parameter_offload.py``), from Qwen's
fine-tuning of 1.8B on one A100 with 256 tokens. PyTorch's FSDP has hooks for the same work: with
this value, the published tables of its small models and short micro-batches are nearer, too."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One row of the table. A plan for this backend never uses a feature that is False."""

    name: BackendName
    title: str
    runtime_memory: bool = False
    """Whether memory follows ``dtrain.runtime``: 32-bit master weights under FSDP, autograd's
    own saved tensors, a receive buffer for each micro-batch of a pipeline."""
    torch_kernels: bool = False
    """PyTorch's own kernels in every layout: SwiGLU keeps its parts, and selective recompute is
    torchtitan's. If False, only with sharded parameters."""
    flash2: bool = False
    """Whether attention is PyTorch's own FlashAttention-2."""
    sends_shares: bool = True
    """Whether each tensor rank sends its share of an activation to the next stage even without
    sequence parallelism (scatter-gather, SC21 section 4.1)."""
    overlaps_sends: bool = False
    """Whether an interleaved pipeline sends activations while it computes: Megatron-LM since 2023,
    unless ``--no-overlap-p2p-communication``. It does not without interleaving."""
    fused_adam: bool = False
    """As in `MemoryHabits`: torchtitan's ``optimizer.implementation`` is ``fused``."""
    sums_fp16: bool = False
    """Whether gradients of fp16 are summed in 16 bits, as Megatron-LM does by default."""
    gathers_fp8: bool = False
    """Whether fp8's parameters are also gathered in fp8 (``enable_fsdp_float8_all_gather``)."""
    sends_tokens_once: bool = True
    """Whether a host with several of a token's experts receives the token once."""
    groups_across_hosts: bool = True
    """Whether plans put the context ranks of a sequence, or the ranks that share experts, on
    several hosts."""
    expert_kernels: int = 0
    module_work: float = 0.0
    sharding_work: float = 0.0
    """All three as in `Assumptions`."""
    recomputes_experts: bool = True
    """Whether layers whose experts are on several ranks can be recomputed selectively."""
    runs_on_cpus: bool = False
    """Megatron-LM and torchtitan need a GPU."""
    precisions: tuple[Precision, ...] = PRECISIONS
    copies_keys: bool = True
    """Whether key heads are copied if there are fewer than tensor ranks."""
    pads_vocabulary: bool = True
    """Whether the vocabulary is padded to a multiple of the tensor ranks."""
    splits_any_layer: bool = True
    """Whether tensor parallelism supports experts and latent attention (MLA)."""
    ties_across_stages: bool = True
    """Whether the first and the last pipeline stage can share the vocabulary matrix."""
    uneven_pieces: bool = True
    """Whether an interleaved pipeline can have pieces of different sizes."""
    offloads_parameters: bool = False
    """Whether offload also moves the parameters and the sums of gradients to the host: FSDP2's
    ``CPUOffloadPolicy``. If False, only the optimizer's states."""
    offloads_unsharded: bool = True
    """Whether states that are not sharded can be offloaded. torchtitan passes its
    ``enable_cpu_offload`` to FSDP2 only if that shards over several ranks (``parallelize.py``)."""
    trains_parts: tuple[type[LayerPart], ...] = (LayerPart,)
    """Parts of layers that it has, beside attention and the MLP."""
    splits_diffusion: bool = True
    """Whether tensor and pipeline parallelism support diffusion transformers."""
    omits_blocks: bool = True
    """Whether layers can lack attention or the MLP."""
    trains_adapters: bool = True
    """Whether it trains adapters of a frozen model (LoRA)."""
    frozen_bits: tuple[int, ...] = (16,)
    """Bits in which it can keep frozen matrices."""
    narrow_states: str = ""
    """The setting with which parameters, gradients and Adam's moments all have 16 bits, if any."""
    hides_exchange: str = ""
    """The setting with which tokens are exchanged between experts while others compute, if any."""
    one_graph: str = ""
    """The setting with which one CUDA graph has a whole step, if any."""
    shards_optimizer_alone: bool = True
    """Whether it has ZeRO-1. torchtitan shards by FSDP2: the gradients too, and at least between
    steps the parameters."""
    shards_stages: bool = True
    """Whether plans shard the parameters of pipeline stages, which each micro-batch gathers."""
    keeps_stages: bool = False
    """Whether such a stage gathers its parameters once a step instead, and keeps them and the sum
    of their gradients until its end: torchtitan's ``fsdp_reshard_after_forward = "default"``, and
    PyTorch's pipelines, which reduce gradients after the last micro-batch only."""


BACKENDS: dict[BackendName, Backend] = {
    backend.name: backend
    for backend in (
        Backend(
            "runtime",
            "dtrain.runtime, which `dtrain launch` runs",
            runtime_memory=True,
            torch_kernels=True,
            flash2=True,
            sends_shares=False,
            sends_tokens_once=False,
            groups_across_hosts=False,
            # Three products, the activation and its product with the gate.
            expert_kernels=5,
            sharding_work=PYTORCH_HOOKS,
            recomputes_experts=False,
            runs_on_cpus=True,
            precisions=("bf16", "fp16", "tf32", "fp32"),
            copies_keys=False,
            pads_vocabulary=False,
            splits_any_layer=False,
            ties_across_stages=False,
            uneven_pieces=False,
            offloads_parameters=True,
            trains_parts=(),
            omits_blocks=False,
            trains_adapters=False,
            shards_stages=False,
        ),
        Backend(
            "megatron",
            "Megatron-LM or NeMo",
            overlaps_sends=True,
            sums_fp16=True,
            module_work=TRANSFORMER_ENGINE,
            sharding_work=MEGATRON_FSDP,
            frozen_bits=(16, 8),
            hides_exchange="--overlap-moe-expert-parallel-comm",
            one_graph="--cuda-graph-impl full_iteration",
        ),
        Backend(
            "torchtitan",
            "torchtitan",
            torch_kernels=True,
            sharding_work=PYTORCH_HOOKS,
            flash2=True,
            fused_adam=True,
            gathers_fp8=True,
            sends_tokens_once=False,
            # ``training.mixed_precision_param`` is bfloat16 or float32.
            precisions=("bf16", "fp8", "tf32", "fp32"),
            copies_keys=False,
            trains_parts=(Modulation, Twin),
            # Its Flux has FSDP, HSDP and context parallelism (``models/flux/README.md``).
            splits_diffusion=False,
            frozen_bits=(16, 4),
            offloads_parameters=True,
            offloads_unsharded=False,
            narrow_states='training.dtype = "bfloat16"',
            shards_optimizer_alone=False,
            keeps_stages=True,
        ),
    )
}


OTHER_SOFTWARE = {
    "tpu": "MaxText",
    "gaudi": "Optimum for Intel Gaudi",
    "trainium": "NeuronX Distributed Training",
}
"""Software for the devices on which no backend runs, by architecture."""


def without_backend(gpu: Gpu) -> str:
    """Return a note if no backend runs on the device, else ''."""
    if gpu.family not in OTHER_SOFTWARE:
        return ""
    return (
        f"no backend of dtrain runs on {gpu.name}: the plan is an estimate for other software with "
        f"such layouts, such as {OTHER_SOFTWARE[gpu.family]}"
    )


def backend_of(layout: Layout) -> Backend:
    """Return the table's row for ``layout``."""
    return BACKENDS[layout.backend]


def can_offload(layout: Layout) -> bool:
    """Return whether the layout's backend can keep its states in the hosts' memory."""
    return layout.shards > 1 or backend_of(layout).offloads_unsharded


def keeps_stage(layout: Layout) -> bool:
    """Return whether ranks gather sharded parameters once a step, and keep them until its end."""
    return layout.pipeline > 1 and layout.shards_parameters and backend_of(layout).keeps_stages


def reduces_each_micro_batch(layout: Layout) -> bool:
    """Return whether sharded gradients are reduced after every micro-batch.

    They can only accumulate on their own rank. With ZeRO-2, Megatron-LM's pipelines keep whole
    gradients instead until the end of a step.
    """
    if layout.sharding == "gradients":
        return layout.pipeline == 1 or backend_of(layout).runtime_memory
    return layout.shards_parameters and not keeps_stage(layout)


def most_pieces(shape: Shape, layout: Layout) -> int:
    """Return the maximum number of pieces of the layout's pipeline.

    A piece has at least one layer. If that fills the stages evenly, the embedding and the output
    layer each take the place of one (Megatron-LM's ``--account-for-embedding-in-pipeline-split``).
    """
    places = most_stages(shape) + 2
    ends_count = backend_of(layout).uneven_pieces and places % layout.pipeline == 0
    return places if ends_count else most_stages(shape)


def refusals(
    shape: Shape,
    layout: Layout,
    precision: Precision,
    *,
    narrow_states: bool = False,
    hides_exchange: bool = False,
    one_graph: bool = False,
    on_cpus: bool = False,
) -> Iterator[str]:
    """Yield the reasons why the layout's backend cannot train ``shape`` this way, if any."""
    backend = backend_of(layout)
    if on_cpus and not backend.runs_on_cpus:
        yield "CPUs"
    if shape.pattern or shape.parts:
        yield from _missing_parts(shape, backend)
        yield from _unsplit_parts(shape, layout)
    if layout.sharding == "optimizer" and not backend.shards_optimizer_alone:
        yield "an optimizer that is sharded without the gradients (ZeRO-1)"
    if layout.offload and not can_offload(layout):
        yield "offload of states that are not sharded"
    if narrow_states and not backend.narrow_states:
        yield "states of 16 bits without a copy in 32"
    if hides_exchange and not backend.hides_exchange:
        yield "exchanges between experts beside the computation"
    elif hides_exchange and layout.recompute == "full":
        yield "full recompute with exchanges between experts beside the computation"
    if one_graph and not backend.one_graph:
        yield "a CUDA graph of the whole step"
    if shape.lora is not None:
        yield from _untrained_adapters(shape.lora, layout)
    if layout.expert > 1 and layout.recompute == "selective" and not backend.recomputes_experts:
        yield "selective recompute of layers with experts on several ranks"
    if precision not in backend.precisions:
        library = {"fp8": "Transformer Engine or torchao", "nvfp4": "Transformer Engine"}
        yield precision + (f", which needs {library[precision]}" if precision in library else "")
    if layout.tensor > 1:
        yield from _unsplit_layers(shape, layout)
    if layout.pipeline > 1:
        yield from _impossible_stages(shape, layout)


def _untrained_adapters(lora: Lora, layout: Layout) -> Iterator[str]:
    """Yield why the layout's backend cannot train adapters this way."""
    backend, bits = backend_of(layout), lora.base_bits
    if not backend.trains_adapters:
        yield "LoRA"
    elif bits not in backend.frozen_bits:
        yield f"frozen weights of {bits} bits" + (" (QLoRA)" if bits == 4 else "")
    elif bits == 4 and (layout.tensor > 1 or layout.pipeline > 1):
        yield "tensor or pipeline parallelism of weights of 4 bits (QLoRA)"


def _unsplit_layers(shape: Shape, layout: Layout) -> Iterator[str]:
    """Yield why tensor ranks of the layout's backend cannot split a layer."""
    backend, t = backend_of(layout), layout.tensor
    if shape.kv_heads % t and not shape.kv_rank and not backend.copies_keys:
        heads = "the only key head" if shape.kv_heads == 1 else f"the {shape.kv_heads} key heads"
        yield f"tensor {t}, which does not divide {heads}"
    if shape.vocab % t and not backend.pads_vocabulary:
        yield f"tensor {t}, which does not divide the vocabulary of {shape.vocab:,}"
    if (shape.experts or shape.kv_rank) and not backend.splits_any_layer:
        yield "tensor parallelism of experts or of latent attention"


def _impossible_stages(shape: Shape, layout: Layout) -> Iterator[str]:
    """Yield why the layout's backend cannot have its pipeline."""
    backend = backend_of(layout)
    if shape.tied and not backend.ties_across_stages:
        yield "a pipeline of a model whose embedding and output layer are one matrix"
    if layout.shards_parameters and layout.copies > 1 and not backend.shards_stages:
        yield "pipeline stages with sharded parameters"
    if layout.grad_accumulation < layout.pipeline and not backend.shards_stages:
        yield "fewer micro-batches than pipeline stages"
    pieces = layout.pipeline * layout.virtual_pipeline
    if layout.virtual_pipeline > 1 and shape.layers % pieces and not backend.uneven_pieces:
        yield f"a pipeline whose pieces do not divide the {shape.layers} layers"


def _unsplit_parts(shape: Shape, layout: Layout) -> Iterator[str]:
    """Yield how the layout splits parts of layers that its backend cannot split."""
    parts, pipeline = shape.every_part, layout.pipeline > 1
    if pipeline and any(isinstance(part, CrossAttention) for part in parts):
        # Megatron-LM: "Pipeline parallelism is not supported for T5" (``pretrain_t5.py``).
        yield "a pipeline of an encoder and a decoder"
    diffusion = any(isinstance(part, (Modulation, Twin)) for part in parts)
    if diffusion and (pipeline or layout.tensor > 1) and not backend_of(layout).splits_diffusion:
        yield "tensor or pipeline parallelism of diffusion transformers"


def _missing_parts(shape: Shape, backend: Backend) -> Iterator[str]:
    """Yield the first part of layers that ``backend`` does not have, if any."""
    for part in shape.every_part:
        if not isinstance(part, backend.trains_parts):
            yield part.title
            return
    lacking = any(not (kind.heads and kind.ffn_hidden) for kind, _ in shape.kinds)
    if lacking and not backend.omits_blocks:
        yield "layers without attention or without an MLP"
