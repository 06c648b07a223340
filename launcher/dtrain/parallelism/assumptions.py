"""The planner's assumptions about the software that trains a layout."""

from __future__ import annotations

import math
from typing import Literal

from dtrain.parallelism.backends import BACKENDS, backend_of
from dtrain.parallelism.cluster.hardware import Gpu, Precision
from dtrain.parallelism.model.shape import Shape
from dtrain.records import KeepsHash, dataclass
from dtrain.runtime.layout import BackendName, Layout

OLD = ("volta", "turing")
"""Architectures for which there is no FlashAttention-2."""


CONTEXT = 0.7
"""GiB of CUDA's context and loaded kernels (0.5 to 0.9; PyTorch 2, CUDA 12)."""

UNTRAINED = 1.25
"""`Assumptions.uneven` of new routers and of random tokens, which most published runs have: with
it, 97 runs of six publishers have errors of 14 % instead of 26 %."""
FLASH_1 = 0.45
TRITON_ATTENTION = 0.62
"""`Assumptions.early_attention`: FlashAttention-2 is 1.7 to 3.0 times as fast as FlashAttention,
and 1.3 to 2.5 times as fast as its version in Triton (arXiv 2307.08691, section 4.1). The first is
the middle of its range. The second has the least error in 153 runs of MosaicML on A100s: 4.2 %, and
4.5 to 4.8 % with 0.59 and 0.66."""
COMPILED_LOSS = 4.0
"""`Assumptions.loss_bytes` if ``torch.compile`` makes one kernel of the loss, which keeps logits
and their gradient of 16 bits."""
COMMUNICATOR = 0.65
"""GiB of NCCL's buffers for each communicator: 0.53 for two and 0.67 for more ranks on A100s with
NVLink (NVIDIA/nccl issue 964), 0.56 on GB200s (sglang pull request 30908)."""


def communicator(gpu: Gpu) -> float:
    """Return the GiB of a communicator's buffers: TPUs and CPUs have none."""
    return 0.0 if gpu.family == "tpu" or gpu.is_cpu else COMMUNICATOR


def fp8_copies(gpu: Gpu) -> float:
    """Return the bytes of Transformer Engine's quantized copies for each parameter of a matrix: the
    matrix, and its transpose where products need it (``is_non_tn_fp8_gemm_supported``)."""
    return 1.0 if gpu.family == "blackwell" else 2.0


def _most(shape: Shape, ranks: int) -> float:
    """Return the most copies of tokens that one of ``ranks`` can get, relative to their mean."""
    return ranks * min(1.0, shape.experts / ranks / shape.experts_per_token)


@dataclass(frozen=True, slots=True)
class MemoryHabits:
    """What software keeps in memory, if it differs from Megatron-LM."""

    both_gradients: bool = False
    """Whether gradients of 16 bits stay beside the sums of 32 bits to which they are added:
    DeepSpeed's BF16_Optimizer."""
    step_copies: float = 0.0
    """Bytes of each parameter in a rank's share that the optimizer's step needs beside the states.
    DeepSpeed flattens 16-bit gradients before it casts them (``stage_1_and_2.py``), which is 2.
    In InternEvo (``hybrid_zero_optim.py``), PyTorch's Adam also needs two temporaries of one flat
    tensor: 2 + 8. A flat copy is one block, so the allocator cannot place it, nor the cast, where
    activations were."""
    frees_gradients: bool = False
    """Whether a step frees the gradients, so that the next one allocates them again, in blocks
    where activations were. The allocator's unused share then is as high as with flat copies: 6 to
    20 % in a simulation of three steps with LLaMA's tensors."""
    foreach: bool = True
    """Whether Adam updates all tensors at once, with temporaries of all of them: PyTorch's default.
    Composer's ``DecoupledAdamW`` updates one after the other."""
    fused_adam: bool = False
    """Whether a kernel updates each tensor in place, without temporaries: PyTorch's
    ``AdamW(fused=True)``."""
    offloads: Literal["optimizer", "gradients", "all"] = "optimizer"
    """What offload moves to the host. "gradients": the optimizer's states and the gradients that
    wait for it, as in DeepSpeed. "all": the parameters, too, as FSDP2's ``CPUOffloadPolicy``."""
    moment_bytes: float = 4.0
    """Bytes of each of Adam's two moments of a parameter. Transformer Engine's Adam copies narrower
    ones of all parameters to 32 bits for the step (``get_unscaled_state`` in ``fused_adam.py``;
    since 2.13, not those of bf16). 0: Adafactor has a row and a column for each matrix."""
    master_bytes: float = 4.0
    """Bytes of a parameter's copy in 32 bits. 2: only the bits that the 16-bit parameter does not
    have (Megatron-Core's ``store_param_remainders``)."""
    keeps_outputs: bool = False
    """Whether a pipeline stage keeps its output until the micro-batch's backward pass, and has few
    receive buffers, as in DeepSpeed's engine. Megatron-LM frees it after the send."""
    gathers_logits: bool = False
    """Whether every tensor rank has the logits of the whole vocabulary for the loss, and the last
    stage of a pipeline keeps those of two micro-batches. In Megatron-LM, a rank has only its part
    of them."""
    copies_inputs: bool = False
    """Whether each product that tensor ranks split by columns keeps its own copy of its input:
    PaddlePaddle's ``c_identity``. Queries, keys and values are one product with plain MLPs, as in
    GPT, and three with gated ones, as in LLaMA, whose gate also is a product."""
    repeats_keys: bool = False
    """Whether keys and values are copied for each query head before attention, which keeps the
    copies: Hugging Face's ``repeat_kv``, lit-gpt until 2024, Megatron-LM before Megatron-Core."""
    fused_gate: bool | None = None
    """Whether one kernel multiplies the MLP's gate and computes it again for the backward pass.
    None: as Megatron-Core's does, and PyTorch's kernels do not. True: Liger's SwiGLU, although the
    other kernels are PyTorch's. False: Megatron-LM before Megatron-Core."""
    unfused: bool = False
    """Whether layers consist of PyTorch's kernels, although the states are as in Megatron-LM."""
    context: float = CONTEXT
    """GiB of CUDA's context and kernels. Before PyTorch 1.13 loaded kernels on first use, 1.3 to
    1.8."""
    fullest: Literal["", "first", "last", "inner"] = ""
    """The stage of a pipeline that has as many layers as any, although it has the embedding or the
    output layer. nanotron's ``build_model`` fills stages in order until each has more than its
    share, InternEvo's ``partition_uniform`` gives the last ones one more. With Megatron-LM, users
    give these stages fewer layers. "inner": all stages have equally many modules, of which the
    embedding, the last norm and the output layer are three, and the first stages have one more if
    they do not divide (``pipe_partition_uniform`` in Aleph-Alpha/scaling). Step times assume the
    usual stages."""
    whole_gradients: bool = False
    """Whether sharded parameters have whole gradients on each rank until a step's last micro-batch:
    PyTorch's ``no_sync``, which Lightning Fabric's and Hugging Face's accumulation use (pytorch
    pull request 126166 describes both ways). They have the precision of the gathered parameters:
    FSDP1 casts gradients only when it reduces them (``_post_backward_hook``)."""
    keeps_gathered: bool = False
    """Whether the gathered parameters of a layer stay until its backward pass: with FSDP2's
    ``reshard_after_forward=False``, and without recomputation in DeepSpeed's ZeRO-3 with PyTorch's
    own linear layers (``mem_efficient_linear=False``), because autograd keeps them."""
    wide_sums: bool = False
    """Whether whole gradients are summed in the 32 bits in which they are reduced, although
    parameters have 16: FSDP2's ``to_accumulated_grad_if_needed``."""
    flat_adapters: bool = False
    """Whether a layer's adapters are in one flat parameter with its frozen weights, so that these
    have gradients, too: PyTorch's FSDP1, if no policy wraps the adapters (its warning "gradient
    memory usage will be higher", litgpt pull request 1538)."""
    keeps_inputs: bool = False
    """Whether, with frozen weights under FSDP1, a recomputed layer's input and its gradient stay
    until the end of the backward pass. FSDP1's hook on that input
    (``_register_post_backward_reshard_only_hook``) holds the node that has both, if checkpoints
    are reentrant, as Hugging Face's are by default."""
    frozen_inputs: int = 0
    """Micro-batches of which products with matrices of 4 bits keep their inputs, although no
    gradient needs them: bitsandbytes before 0.43.3 (its pull request 1270). 2 with those of the
    micro-batch before; 1 if that is short."""
    wide_rest: bool = False
    """Whether parameters that are not in 4 bits are stored and gathered in 32, and so the residual
    stream has 32 bits, too: PEFT's ``prepare_model_for_kbit_training``, and autocast without a
    policy of mixed precision for FSDP."""
    holds_outputs: bool = False
    """Whether the loop holds what a model of Hugging Face returns until the backward pass ends:
    logits in 32 bits, and the keys and values of all layers (``use_cache``, which is on by default
    if a wrapper recomputes the layers)."""
    placed: bool = False
    """Whether each tensor has its place before the run, so that no memory stays unused: XLA."""
    recomputes_activation: bool | None = None
    """Whether selective recompute drops the outputs of norms and of the MLP's activation. None: as
    `Assumptions.recomputes_modules` says. False: it recomputes the core of attention alone, which
    is Megatron-Core's default (``core_attn``)."""
    recomputes_parts: bool = False
    """Whether full recompute computes attention and the MLP apart from each other, so that a layer
    keeps the inputs of both: xLLM's fused blocks."""
    repeats_exchange: bool = False
    """Whether torchtitan's selective recompute sends tokens to their experts and back again,
    instead of keeping what arrived: its Qwen3 until March 2026 (its pull request 2357)."""
    gelu_bytes: float = 0.0
    """Bytes of an inner activation that a GELU keeps beside its input and output. minGPT's formula
    under autocast: its input, the hyperbolic tangent and one more than that in 32 bits, because
    ``pow`` is computed so, and half of the input in 16."""
    gathers_fp8: bool = False
    """Whether layers are gathered in fp8: torchao's ``enable_fsdp_float8_all_gather``."""
    overwrites_mlp: bool = False
    """Whether one kernel computes an MLP with adapters, whose backward pass computes the last
    product's input again, and writes gradients where the gate's tensors were: Axolotl's
    ``lora_mlp_kernel``, as in Unsloth (``swiglu_backward``)."""
    fixed_segments: bool = False
    """Whether the allocator has segments of a fixed size, PyTorch's default. torchtitan and
    torchtune set ``expandable_segments:True``."""
    records_streams: bool = False
    """Whether blocks of tensors that tensor ranks exchange are used again only when the GPU has
    exchanged them: PyTorch before 2.8 (``record_stream``), unless
    ``TORCH_NCCL_AVOID_RECORD_STREAMS=1``, which NVIDIA's scripts set."""
    buckets: float = 0.0
    """GiB of buffers in which gradients are reduced, on one GPU too, if those are not views of the
    gradients: DeepSpeed's ``reduce_bucket_size`` is 5e8 elements of 2 bytes, or two of 2e8."""


@dataclass(frozen=True, slots=True)
class Assumptions(KeepsHash):
    precision: Precision = "bf16"
    flash_attention: bool = True
    flash2: bool | None = None
    """Whether flash attention is FlashAttention-2, and not a newer one. None: as the backend's."""
    document: int = 0
    """Tokens of each document, if several are packed into a sequence and flash attention does not
    look from one into another; 0: a sequence is one document."""
    early_attention: float = 1.0
    """Speed of flash attention before version 2, as a share of FlashAttention-2's: `FLASH_1`,
    `TRITON_ATTENTION`."""
    fused_loss: bool = False
    """Whether cross-entropy overwrites the logits with their gradient in 16 bits, as flash-attn's
    kernel does. PyTorch's own kernel uses 32-bit copies."""
    loss_bytes: float | None = None
    """Bytes for each logit at the peak of a loss that neither PyTorch's modules compute in 32 bits,
    nor Megatron-LM in place. 10: Megatron-Core until 0.6 subtracts the maximum of 32-bit logits
    into a copy (``tensor_parallel/cross_entropy.py``), beside the 16-bit ones. 8: PyTorch's kernel
    gets 16-bit logits, which the caller keeps; or a Triton kernel overwrites 32-bit logits with
    their gradient, beside a second copy. `COMPILED_LOSS`."""
    varied_lengths: bool = False
    """Whether micro-batches differ in length, up to the sequence length."""
    loss_chunks: int = 1
    """Parts of a micro-batch whose logits, loss and gradients are computed one after the other, so
    that memory holds the logits of one part."""
    repeats_loss: bool = False
    """Whether metrics of the training compute the loss again from all logits, as Composer's do
    (``LanguageCrossEntropy`` and ``LanguagePerplexity``, llm-foundry's ``use_train_metrics``)."""
    fp32_gradients: bool = True
    """Whether 16-bit gradients are accumulated in 32 bits, as in Megatron-LM with bf16."""
    quantized: float = 0.0
    """Bytes for each parameter of a layer that fp8 adds to those of 16 bits: Transformer Engine
    quantizes a matrix once a step, and keeps that beside the 16-bit one. Below 0 if it has fp8
    parameters only (``--fp8-param-gather``)."""
    narrow_states: bool = False
    """Whether parameters, gradients and Adam's moments have 16 bits, without a copy in 32: what
    fine-tuning with ``--precision bf16-true`` (Lightning), torchtune's ``dtype: bf16`` and a model
    that Hugging Face's Trainer loads in 16 bits without autocast do."""
    separate_kernels: bool = False
    """Whether each operation of RMS norms and rotations is a kernel, as in PyTorch before 2.9
    without ``torch.compile``."""
    separate_expansion: bool = False
    """Whether each operation that expands a matrix of 4 bits is a kernel, as for GPTQ's in training
    (AutoGPTQ). bitsandbytes has one kernel for it."""
    host_work: float = 0.0
    """Host time in each pass through a layer beside its kernels, as a number of launches."""
    module_work: float = 0.0
    """Host time of a layer's modules in a forward pass beside their kernels, as a number of
    launches, in models without experts."""
    sharding_work: float = 0.0
    """Host time of the hooks that gather and free a layer's sharded parameters in a forward pass,
    as a number of launches."""
    expert_kernels: int = 0
    """Kernels of each expert in a forward pass, if a loop in Python computes one after the other.
    0: all experts of a layer share their kernels."""
    uneven: float = 0.0
    """Standard deviation of the tokens that an expert gets of a micro-batch, relative to their
    mean. 0: benchmarks force the balance (``--moe-router-force-load-balancing``), and trained
    routers are near it. DeepSeek-V3's whole training took 9 % longer than estimated with 0."""
    capacity: float = 0.0
    """Tokens that each expert computes, relative to their mean, if that number is fixed
    (Megatron-Core's ``--moe-pad-expert-input-to-capacity``). Then the host need not know how many
    arrive. 0: it is not fixed."""
    masks_experts: bool = False
    """Whether tokens reach experts of a fixed capacity, and return, by products with a mask of each
    sequence's tokens and places (MaxText: ``BSM,BSEC -> EBCM`` in ``layers/moe.py``)."""
    room_for_all: bool = False
    """Whether a rank's tensors have room for all copies that its experts could get of the tokens of
    all ranks: those of XLA have one size, so experts without a capacity need the largest
    (MaxText: ``buffer_size`` in ``layers/moe.py``)."""
    blocking: bool = False
    """Whether the host waits for each kernel before it starts the next (``CUDA_LAUNCH_BLOCKING``).
    Then no communication overlaps with computation."""
    one_graph: bool = False
    """Whether one CUDA graph has all kernels of a step: then no GPU waits for the host."""
    fuses_gradients: bool = True
    """Whether a product adds a weight's gradient to its sum itself (Megatron-LM's
    ``gradient_accumulation_fusion``). PyTorch's own modules never do."""
    overlaps_reduction: bool = True
    """Whether gradients are reduced and parameters gathered while others are computed."""
    gathers_after: bool = False
    """Whether a step ends when the shares of whole parameters are gathered, so that nothing hides
    this, and sums of gradients wait for the last micro-batch's backward pass: DeepSpeed's ZeRO-1
    and 2 (``all_gather_dp_groups`` in ``step``), InternEvo (``overlap_sync_param=False`` in its
    configurations). Megatron-LM gathers during the next forward pass."""
    gathers_late: bool = False
    """Whether FSDP gathers a layer's parameters for the backward pass only after the gradients of
    the layer before are computed: PyTorch's ``BackwardPrefetch.BACKWARD_POST``."""
    idle: float = 0.0
    """Seconds that each layer and micro-batch take longer than their kernels."""
    reduces_to_all: bool = False
    """Whether every rank gets the sum of all gradients, although it updates only its share."""
    hides_tensor: bool = False
    """Whether tensor-parallel traffic runs in pieces beside the products of the same layer
    (Transformer Engine's user buffers, ``--tp-comm-overlap``, which is off by default)."""
    hides_exchange: bool = False
    """Whether tokens are exchanged between experts while another micro-batch computes: DualPipe
    (DeepSeek-V3, arXiv 2412.19437, section 3.2.1), Megatron-Core's
    ``--overlap-moe-expert-parallel-comm``."""
    sends_copies: bool | None = None
    """Whether a token goes to each of its experts separately, even if a host has several of them:
    Megatron-Core's all-to-all dispatcher. DeepEP and HybridEP send it to a host once. None: as the
    backend does."""
    whole_experts: bool = True
    """Whether tensor ranks hold different experts (``--expert-tensor-parallel-size 1``), and not
    parts of each expert, which is Megatron-Core's default."""
    communicator: float = COMMUNICATOR
    """GiB of a communicator's buffers."""
    habits: MemoryHabits = MemoryHabits()

    @classmethod
    def usual(
        cls,
        precision: Precision,
        gpu: Gpu,
        backend: BackendName,
        *,
        narrow_states: bool = False,
        hides_exchange: bool = False,
        one_graph: bool = False,
    ) -> Assumptions:
        """Return what ``backend`` does on a GPU. FlashAttention-2 needs an A100 or newer; on older
        GPUs, PyTorch has a kernel that keeps no score matrix either, and other software has none.
        """
        return cls(
            precision,
            flash_attention=gpu.family not in OLD or BACKENDS[backend].flash2,
            fp32_gradients=precision != "fp16" or not BACKENDS[backend].sums_fp16,
            quantized=fp8_copies(gpu) if precision == "fp8" and backend == "megatron" else 0.0,
            narrow_states=narrow_states,
            hides_exchange=hides_exchange,
            one_graph=one_graph,
            expert_kernels=BACKENDS[backend].expert_kernels,
            module_work=BACKENDS[backend].module_work,
            sharding_work=BACKENDS[backend].sharding_work,
            communicator=communicator(gpu),
            habits=MemoryHabits(
                fused_adam=BACKENDS[backend].fused_adam,
                offloads="all" if BACKENDS[backend].offloads_parameters else "optimizer",
                context=0.0 if gpu.is_cpu else CONTEXT,
            ),
        )

    @property
    def step_copies(self) -> float:
        """Bytes of each parameter in a rank's share of the step's flat copies, with the cast of
        gradients of 16 bits."""
        copies = self.habits.step_copies
        return copies + 4 if copies and not self.fp32_gradients else copies

    def old_attention(self, layout: Layout) -> bool:
        """Whether flash attention is FlashAttention-2."""
        return backend_of(layout).flash2 if self.flash2 is None else self.flash2

    def by_torch(self, layout: Layout) -> bool:
        """Whether PyTorch's own modules run, without Megatron-LM's fused kernels."""
        return layout.shards_parameters or backend_of(layout).torch_kernels

    def unfused(self, layout: Layout) -> bool:
        """Whether a layer's kernels are PyTorch's own."""
        return self.habits.unfused or self.by_torch(layout)

    def gradient_traffic(self, layout: Layout) -> int:
        """Bytes that each micro-batch reads and writes for the gradient of one parameter.

        A fused product reads and writes the sum. Otherwise, it writes a gradient that another
        kernel adds to the sum. FSDP copies it to the flat buffer that its reduction reads.
        """
        own = 4 if self.precision in ("tf32", "fp32") else 2
        total = 4 if self.fp32_gradients else own
        if layout.shards_parameters:
            return 4 * own
        fused = self.fuses_gradients and not self.by_torch(layout)
        return 2 * total if fused else 2 * own + 2 * total

    def busiest(self, shape: Shape, layout: Layout) -> float:
        """Tokens of the rank whose experts get the most of a micro-batch, relative to the mean. The
        other ranks wait for it in each layer.

        It is the expected maximum of normal values, one for each rank, with the standard deviation
        of a mean of its experts. But no rank can get more than one copy of a token for each of its
        experts.
        """
        if self.capacity:
            return self.capacity
        ranks = layout.expert * (layout.tensor if self.spreads_experts(shape, layout) else 1)
        if ranks == 1 or not self.uneven:
            return 1.0
        held = shape.experts / ranks
        above = self.uneven * math.sqrt(2 * math.log(ranks) / held)
        most = _most(shape, ranks) - 1
        return 1 + above * most / (above + most)

    def empty(self, shape: Shape, layout: Layout) -> float:
        """Copies of a token for which a rank has room without getting them (see `room_for_all`),
        for each token of its micro-batch."""
        if not self.room_for_all or not shape.experts:
            return 0.0
        rest = _most(shape, layout.expert) - self.busiest(shape, layout)
        return shape.experts_per_token * max(0.0, rest)

    def spreads_experts(self, shape: Shape, layout: Layout) -> bool:
        """Whether a layer's experts are whole and spread over ``expert`` x ``tensor`` ranks."""
        ranks = layout.expert * layout.tensor
        return self.whole_experts and shape.experts > 0 and shape.experts % ranks == 0

    def recomputes_modules(self, shape: Shape, layout: Layout) -> bool:
        """Whether selective recompute drops the outputs of norms, of the experts' activation and of
        MLA's up projections: Megatron-Core's ``--recompute-modules layernorm moe_act mla_up_proj``,
        as DeepSeek-V3 was trained (arXiv 2412.19437, section 3.2.3). Other models usually keep
        them."""
        several = self.habits.recomputes_activation
        if several is None:
            several = (shape.experts > 0 or shape.kv_rank > 0) and not self.unfused(layout)
        return layout.recompute == "selective" and several
